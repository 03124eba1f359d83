"""Softmax attention and what other papers make of it to train without skips.

Every variant is Flax's `nnx.MultiHeadAttention`: its `attention_fn` decides what happens between the
projections, its kernels how they start.

| variant | values of a head become | start |
|---|---|---|
| `softmax` | `A V` | |
| `value_skipinit` | `(a I + b A) V` | a = 1, b = 0 |
| `shaped` | `(a I + b A - g C) V` with `C = 1 1^T / N` | a = b = g = 1, W^Q = 0: the identity |
| `e_spa` | `diag(r) softmax(Q K^T / sqrt(D) + B) V` | W^Q = 0: the matrix of `exponential_decay` |
| `ns_attention` | `||H|| p(H / ||H||)` with `H = A V` | |

Shape legend: `N` tokens, `H` heads, `D` head width, `F` features.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from osa_jax.initializers import stiefel
from osa_jax.linalg import at_least_float32, compute_dtype
from osa_jax.nn.common import HeadInit, KernelInits, kernel_inits

Softmax = Literal["softmax", "value_skipinit", "shaped", "e_spa", "ns_attention"]
Init = Literal["standard", "orthogonal", "cutting_the_skip"]

_FINAL_DECAY = 0.005


class CombinedAttention(nnx.Module):
    """`(a I + b A - g C) V` with softmax's A and `C = 1 1^T / N`; a, b and g are trained, per head.

    Args:
      num_heads: the number of heads H.
      identity: start value of a.
      softmax: start value of b.
      uniform: start value of g; None leaves C out.
      param_dtype: dtype of the coefficients.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> attend = CombinedAttention(2, identity=1.0, softmax=0.0, uniform=None)
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 16, 2, 8))
      >>> bool(jnp.array_equal(attend(q, k, v), v))
      True

    He et al. (2023), arXiv:2302.10322 (Value-SkipInit); Noci et al. (2023), arXiv:2306.17759 (shaped).
    """

    def __init__(
        self,
        num_heads: int,
        *,
        identity: float,
        softmax: float,
        uniform: float | None,
        param_dtype: DTypeLike = jnp.float32,
    ) -> None:
        self.identity = nnx.Param(jnp.full((num_heads,), identity, param_dtype))
        self.softmax = nnx.Param(jnp.full((num_heads,), softmax, param_dtype))
        self.uniform = None if uniform is None else nnx.Param(jnp.full((num_heads,), uniform, param_dtype))

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
        """Queries, keys and values `[..., N, H, D]` to the heads' outputs; the options are Flax's."""
        _refuse_masks(options)
        attended = nnx.dot_product_attention(query, key, value, **options)
        out = _times(self.identity[...], value) + _times(self.softmax[...], attended)
        if self.uniform is None:
            return out
        return out - _times(self.uniform[...], jnp.mean(value, axis=-3, keepdims=True))


class ExponentialAttention(nnx.Module):
    """E-SPA: `diag(r) softmax(Q K^T / sqrt(D) + B) V`, at `Q = 0` the matrix of `exponential_decay`.

    It has no parameters: B and r are constants of the layer and the number of tokens.

    Args:
      layer: the layer's number, from 1 to `depth`.
      depth: the number of attention layers.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> v = jax.random.normal(jax.random.key(0), (4, 16, 2, 8))
      >>> ExponentialAttention(layer=1, depth=6)(0 * v, v, v).shape
      (4, 16, 2, 8)

    He et al. (2023), arXiv:2302.10322.
    """

    def __init__(self, *, layer: int, depth: int) -> None:
        self.layer = layer
        self.depth = depth

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
        """Queries, keys and values `[..., N, H, D]` to the heads' outputs; the options are Flax's."""
        _refuse_masks(options)
        decay = exponential_decay(query.shape[-3], self.layer, self.depth)
        rows = decay.sum(1)
        bias = np.log(decay / rows[:, None]).reshape((1,) * (query.ndim - 2) + decay.shape)
        attended = nnx.dot_product_attention(query, key, value, bias=jnp.asarray(bias, query.dtype), **options)
        return jnp.einsum("n,...nhd->...nhd", jnp.asarray(rows, attended.dtype), attended)


@functools.cache
def exponential_decay(num_tokens: int, layer: int, depth: int) -> np.ndarray:
    """The attention matrix of E-SPA at the start, in float64.

    `A_l = L_l L_{l-1}^-1` with `L_l` the symmetric square root of `Sigma_l(i, j) = exp(-gamma_l |i - j|)`, so that
    tokens which start uncorrelated have the correlations Sigma_l after layer l. The decay
    `gamma_l = -log(1 - a^(2 l / depth)) / 2` falls from infinity (`L_0 = I`) to 0.005 at the last layer. The entries
    are positive; where rounding hides that, they are raised to eps, for a logarithm is taken of them.

    Args:
      num_tokens: the number of tokens N.
      layer: l, from 1 to `depth`.
      depth: the number of attention layers.

    Returns:
      An array `[N, N]`.

    Example:
      >>> exponential_decay(3, 1, 12).round(2).tolist()
      [[0.95, 0.28, 0.13], [0.28, 0.92, 0.28], [0.13, 0.28, 0.95]]

    He et al. (2023), arXiv:2302.10322.
    """
    eps = float(np.finfo(np.float64).eps)
    now, before = (_correlations(num_tokens, index / depth) for index in (layer, layer - 1))
    decay = _power(now, 0.5) @ _power(before, -0.5)
    return np.maximum(decay, eps)


def newton_schulz_attention(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    """NS-Attention: softmax attention whose heads' outputs H are drawn towards orthogonality.

    `||H|| p(H / ||H||)` with Frobenius norms and one cubic Newton-Schulz step `p(X) = 1.5 X - 0.5 X X^T X`, which is
    `1.5 H - 0.5 H (H^T H) / ||H||^2`. The paper's coefficients are not public: these are the classical ones.

    Args:
      query: `[..., N, H, D]`.
      key: `[..., N, H, D]`.
      value: `[..., N, H, D]`.
      **options: those of `nnx.dot_product_attention`.

    Returns:
      The heads' outputs `[..., N, H, D]`; zero where H is.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> v = jax.random.normal(jax.random.key(0), (4, 16, 2, 8))
      >>> newton_schulz_attention(v, v, v).shape
      (4, 16, 2, 8)

    arXiv:2609.27735.
    """
    attended = nnx.dot_product_attention(query, key, value, **options)
    heads = attended.astype(compute_dtype(attended))
    gram = jnp.einsum("...nhd,...nhe->...hde", heads, heads, precision=jax.lax.Precision.HIGHEST)
    square = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
    correlation = gram / jnp.where(square > 0, square, 1)
    bent = jnp.einsum("...nhd,...hde->...nhe", heads, correlation, precision=jax.lax.Precision.HIGHEST)
    return (1.5 * heads - 0.5 * bent).astype(attended.dtype)


def cutting_the_skip(key: jax.Array, *, num_heads: int) -> KernelInits:
    """The start that lets softmax attention train without skips, layer norms kept.

    `W^V = 3 U` and `W^O = 3 V^T` with U and V those of a random matrix, that is independent Haar draws; for each head
    `W^Q W^K^T` is the best approximation of rank D of `2 Z + 0.6 I`, `Z_ij ~ N(0, 1 / F)`.

    Args:
      key: the random key of the query and key kernels, whatever key they are called with.
      num_heads: the number of heads.

    Returns:
      Initialisers of the four kernels in the flattened form `[F, H * D]`, `[H * D, F]`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> inits = cutting_the_skip(jax.random.key(0), num_heads=2)
      >>> value = inits.value(jax.random.key(1), (16, 16), jnp.float32)
      >>> bool(jnp.allclose(value.T @ value, 9 * jnp.eye(16), atol=1e-4))
      True

    Ji et al. (2025), arXiv:2510.00345.
    """

    def factor(index: int) -> Callable[..., jax.Array]:
        def init(_: jax.Array, shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
            features, total = shape
            keys = jax.random.split(key, num_heads)
            wide = at_least_float32(dtype)
            halves = jax.lax.map(lambda k: _query_key_factors(k, features, total // num_heads, wide)[index], keys)
            return jnp.moveaxis(halves, 0, 1).reshape(shape).astype(dtype)

        return init

    def scaled(key: jax.Array, shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
        return 3 * stiefel()(key, shape, dtype)

    return KernelInits(factor(0), factor(1), scaled, scaled)


def softmax_attention(
    variant: Softmax,
    num_heads: int,
    width: int,
    *,
    layer: int,
    depth: int,
    init: Init,
    head_init: HeadInit,
    dtype: DTypeLike | None,
    param_dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> nnx.MultiHeadAttention:
    """Flax's attention layer as one of the variants, the `layer`-th of `depth`, from 1."""
    attention = nnx.MultiHeadAttention(
        num_heads,
        width,
        decode=False,
        kernel_init=nnx.initializers.xavier_uniform(),
        attention_fn=_attention_fn(variant, num_heads, layer, depth, param_dtype),
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=rngs,
    )
    for name, kernel_init in _kernel_inits(init, rngs, num_heads, head_init).items():
        kernel = getattr(attention, name).kernel
        kernel[...] = kernel_init(rngs.params(), (width, width), param_dtype).reshape(kernel.shape)
    if variant in ("shaped", "e_spa"):
        attention.query.kernel[...] = jnp.zeros_like(attention.query.kernel[...])
    return attention


def _attention_fn(
    variant: Softmax, num_heads: int, layer: int, depth: int, param_dtype: DTypeLike
) -> Callable[..., jax.Array]:
    """What a variant does between the projections."""
    match variant:
        case "softmax":
            return nnx.dot_product_attention
        case "value_skipinit":
            return CombinedAttention(num_heads, identity=1.0, softmax=0.0, uniform=None, param_dtype=param_dtype)
        case "shaped":
            return CombinedAttention(num_heads, identity=1.0, softmax=1.0, uniform=1.0, param_dtype=param_dtype)
        case "e_spa":
            return ExponentialAttention(layer=layer, depth=depth)
        case "ns_attention":
            return newton_schulz_attention


def _kernel_inits(init: Init, rngs: nnx.Rngs, num_heads: int, head_init: HeadInit) -> dict[str, Callable]:
    """Initialisers by the kernels' names; none for `standard`, which Flax's layer has drawn already."""
    if init == "standard":
        return {}
    if init == "orthogonal":
        return kernel_inits(rngs.params(), num_heads=num_heads, head_init=head_init, kernel_init=None)._asdict()
    return cutting_the_skip(rngs.params(), num_heads=num_heads)._asdict()


def _query_key_factors(key: jax.Array, features: int, width: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """W^Q and W^K of one head, `[F, D]` each."""
    noise = jax.random.normal(key, (features, features), dtype) / np.sqrt(features)
    left, singular, right = jnp.linalg.svd(2 * noise + 0.6 * jnp.eye(features, dtype=dtype))
    root = jnp.diag(jnp.sqrt(singular[:width]))
    return left[:, :width] @ root, right[:width].T @ root


def _times(coefficients: jax.Array, heads: jax.Array) -> jax.Array:
    """Coefficients `[H]` times heads `[..., N, H, D]`, in the latter's dtype."""
    return jnp.einsum("h,...hd->...hd", coefficients.astype(heads.dtype), heads)


def _refuse_masks(options: dict[str, Any]) -> None:
    if options.get("mask") is not None or options.get("is_causal"):
        raise ValueError(
            "mask and is_causal must be left out, got one of them; this attention is defined over all tokens, use "
            "attention='softmax' for masks."
        )


def _correlations(num_tokens: int, part: float) -> np.ndarray:
    """Sigma at a part of the depth in [0, 1]: the identity at 0, gamma = 0.005 at 1."""
    neighbours = np.sqrt(-np.expm1(part * np.log(-np.expm1(-2 * _FINAL_DECAY))))  # exp(-gamma)
    distance = np.abs(np.subtract.outer(np.arange(num_tokens), np.arange(num_tokens)))
    return neighbours**distance


def _power(matrix: np.ndarray, exponent: float) -> np.ndarray:
    """A power of a symmetric positive definite matrix."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * values**exponent) @ vectors.T
