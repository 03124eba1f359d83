"""What the NNX and the Linen layer share: checks of their arguments and the kernels' initialisers.

Shape legend: `N` tokens, `H` heads, `F` features; projections are `[..., N, H, D]`.
"""

import math
from functools import partial
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from osa_jax.attention import Method, orthogonal_attention
from osa_jax.coefficients import Coefficients
from osa_jax.initializers import Initializer, blockwise, query_key_stiefel, stiefel

HeadInit = Literal["joint", "independent"]


class HeadWidths(NamedTuple):
    """Width of one head's queries and keys, and of its values."""

    query_key: int
    value: int


class KernelInits(NamedTuple):
    """Initialisers of the four kernels in the flattened form `[F, H * D]`, `[H * D, F]`."""

    query: Initializer
    key: Initializer
    value: Initializer
    out: Initializer


def check_options(
    *,
    num_heads: int,
    alpha: float,
    head_init: HeadInit,
    method: Method,
    num_iters: int | None,
    coefficients: Coefficients | None,
    dropout_rate: float,
) -> None:
    """Refuse options that no input could make valid."""
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}.")
    if not math.isfinite(alpha):
        raise ValueError(f"alpha must be finite, got {alpha}; it is the start value of every head.")
    if head_init not in get_args(HeadInit):
        raise ValueError(f"head_init must be one of {get_args(HeadInit)}, got {head_init!r}.")
    check_dropout_rate(dropout_rate)
    options: dict[str, Any] = {
        "method": method,
        "num_iters": num_iters,
        "coefficients": coefficients,
    }
    token = jax.ShapeDtypeStruct((1, 1, 1), jnp.float32)
    jax.eval_shape(partial(orthogonal_attention, **options), token, token, token)


def check_dropout_rate(dropout_rate: float) -> None:
    """A rate of 1 would leave nothing, and NaN would silently be no dropout."""
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate must be in [0, 1), got {dropout_rate}; 0.0 switches dropout off.")


def check_rngs(rngs: nnx.Rngs | None, dropout_rate: float) -> nnx.Rngs:
    """There must be a stream for the parameters, and one for dropout if there is any."""
    for stream in ("params", "dropout") if dropout_rate > 0 else ("params",):
        if not hasattr(rngs, stream):
            raise ValueError(
                f"rngs must hold a stream {stream!r}, got {rngs}; pass rngs=nnx.Rngs(0), or "
                "nnx.Rngs(params=0, dropout=1)."
            )
    return cast(nnx.Rngs, rngs)


def head_widths(
    *,
    num_heads: int,
    in_features: int,
    qkv_features: int | None,
    qk_features: int | None,
    kernel_init: Initializer | None,
) -> HeadWidths:
    """Widths of one head; both totals have to divide evenly, and the joint draw has to fit."""
    qkv_features = in_features if qkv_features is None else qkv_features
    qk_features = qkv_features if qk_features is None else qk_features
    for name, total in (("qkv_features", qkv_features), ("qk_features", qk_features)):
        if total < 1 or total % num_heads:
            raise ValueError(
                f"{name} must be a positive multiple of num_heads = {num_heads}, got {total}; "
                f"take for example {max(1, round(total / num_heads)) * num_heads}."
            )
    widths = HeadWidths(qk_features // num_heads, qkv_features // num_heads)
    if kernel_init is None and 2 * widths.query_key > in_features:
        raise ValueError(
            "the joint query-key draw needs 2 * qk_features / num_heads <= in_features, got "
            f"qk_features = {qk_features}, num_heads = {num_heads}, in_features = {in_features}; "
            f"take qk_features <= {in_features // 2 * num_heads}, more heads, or a kernel_init."
        )
    return widths


def kernel_inits(
    key: jax.Array, *, num_heads: int, head_init: HeadInit, kernel_init: Initializer | None
) -> KernelInits:
    """The paper's initialisation, or `kernel_init` for all four kernels.

    The query and key kernels are halves of one draw, so both are made from `key` whatever key they
    are called with.
    """
    if kernel_init is not None:
        return KernelInits(*[kernel_init] * 4)
    pair = query_key_stiefel(num_heads=num_heads)

    def half(index: int) -> Initializer:
        def init(_: jax.Array, shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
            return jnp.split(pair(key, (shape[0], 2 * shape[1]), dtype), 2, axis=1)[index]

        return init

    if head_init == "joint":
        return KernelInits(half(0), half(1), stiefel(), stiefel())
    value, out = blockwise(stiefel(), num_heads), blockwise(stiefel(), num_heads, axis=-2)
    return KernelInits(half(0), half(1), value, out)


def check_inputs(
    inputs_q: jax.Array,
    inputs_k: jax.Array | None,
    inputs_v: jax.Array | None,
    *,
    mask: jax.Array | None,
    in_features: int | None,
    is_causal: bool,
) -> jax.Array:
    """Refuse what is not self-attention over all valid tokens; the tokens, with padding zeroed.

    Padding is zeroed before the projections because 0 * NaN would reach the kernels' gradients.
    """
    for name, other in (("inputs_k", inputs_k), ("inputs_v", inputs_v)):
        if other is not None and other is not inputs_q:
            raise ValueError(
                f"{name} must be left out, got an array of shape {jnp.shape(other)}; orthogonal "
                "attention is self-attention, for cross-attention use Flax's softmax layer."
            )
    if is_causal:
        raise ValueError(
            "is_causal must be False, got True; the exponential of a masked matrix is neither "
            "causal nor orthogonal, use Flax's softmax layer for causal attention."
        )
    if inputs_q.ndim < 2 or in_features not in (None, inputs_q.shape[-1]):
        raise ValueError(
            f"inputs_q must have shape [..., N, {in_features or 'F'}], got {inputs_q.shape}; its "
            "last axis holds the features."
        )
    if not jnp.issubdtype(inputs_q.dtype, jnp.floating):
        raise ValueError(f"inputs_q must be real floating point, got {inputs_q.dtype}; cast it first.")
    if mask is None:
        return inputs_q
    if mask.dtype != jnp.bool_ or mask.shape != inputs_q.shape[:-1]:
        raise ValueError(
            f"mask must be boolean of shape {inputs_q.shape[:-1]}, got {mask.dtype} {mask.shape}; "
            "True marks a valid token, pairs of tokens cannot be masked."
        )
    return jnp.where(mask[..., None], inputs_q, jnp.zeros_like(inputs_q))
