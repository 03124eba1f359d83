"""How much of a signal the tokens still carry: the measures of rank collapse.

Shape legend: `N` tokens, `F` features, `L` blocks; axes before `N` are batch axes.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from osa_jax.linalg import compute_dtype


def kernel_spectrum(tokens: jax.Array) -> jax.Array:
    """The share of each eigenvalue of the tokens' kernel in its trace, the largest first.

    `lambda_i(X X^T) / tr(X X^T)`. Attention with one orthogonal A and orthogonal weights keeps it,
    `A X W (A X W)^T = A X X^T A^T`; after a collapse to one direction it is 1, 0, 0, ...

    Args:
      tokens: `[..., N, F]`, a real floating dtype; the scale does not matter.

    Returns:
      Shares `[..., N]` that add up to 1, in float32 at least; NaN for tokens that are all zero.

    Example:
      >>> import jax.numpy as jnp
      >>> print(kernel_spectrum(jnp.array([[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]])).round(3))
      [0.9 0.1 0. ]

    Zhang & Martens (2026), Theorem 2.2.
    """
    squares = _singular_values(tokens) ** 2
    missing = tokens.shape[-2] - squares.shape[-1]
    shares = squares / jnp.sum(squares, axis=-1, keepdims=True)
    return jnp.pad(shares, [(0, 0)] * (shares.ndim - 1) + [(0, missing)])


def effective_rank(matrix: jax.Array) -> jax.Array:
    """The exponential of the entropy of the singular values: a rank that changes continuously.

    `exp(-sum_i p_i log p_i)` with `p_i = sigma_i / sum_j sigma_j`: k for k equal singular values, and
    never above the rank.

    Args:
      matrix: `[..., N, F]`, a real floating dtype; the scale does not matter.

    Returns:
      Numbers `[...]` from 1 to `min(N, F)`, in float32 at least; NaN for a matrix of zeros.

    Example:
      >>> import jax.numpy as jnp
      >>> effective_rank(jnp.diag(jnp.array([2.0, 2.0, 0.0]))).round(3).item()
      2.0

    Roy & Vetterli, "The effective rank: a measure of effective dimensionality" (2007), section 2.
    """
    values = _singular_values(matrix)
    shares = values / jnp.sum(values, axis=-1, keepdims=True)
    return jnp.exp(jnp.sum(jax.scipy.special.entr(shares), axis=-1))


def mean_cosine(tokens: jax.Array) -> jax.Array:
    """The mean cosine similarity of two distinct tokens.

    `sum_{i != j} cos(x_i, x_j) / (N (N - 1))`: 1 when all tokens point the same way.

    Args:
      tokens: `[..., N, F]` with `N >= 2`, a real floating dtype; a token of zeros has cosine 0.

    Returns:
      Numbers `[...]`, in float32 at least; NaN for tokens that are all zero.

    Raises:
      ValueError: if there are fewer than two tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> print(mean_cosine(jnp.array([[1.0, 0.0], [5.0, 0.0], [0.0, 2.0]])).round(3))
      0.333
    """
    num_tokens = tokens.shape[-2]
    if num_tokens < 2:
        raise ValueError(f"tokens must be at least two, got shape {tokens.shape}; one has no other to be alike.")
    x = _unit_scale(tokens)
    norms = jnp.linalg.norm(x, axis=-1, keepdims=True)
    directions = x / jnp.where(norms > 0, norms, 1)
    total = jnp.sum(jnp.sum(directions, axis=-2) ** 2, axis=-1) - jnp.sum(directions**2, axis=(-2, -1))
    return total / (num_tokens * (num_tokens - 1))


class Signal(NamedTuple):
    """The measures on the way through a transformer, at `2 L + 1` stages.

    The stages are the tokens, then what every block holds after its attention (and its skip) and at
    its end. `spectrum` `[..., 2L + 1, N]`, `rank` and `cosine` `[..., 2L + 1]` are the three measures;
    `attention_kept` `[..., L]` is the product, over the blocks so far, of the effective rank after
    the attention over that before it, which leaves the MLPs' share out.
    """

    spectrum: jax.Array
    rank: jax.Array
    cosine: jax.Array
    attention_kept: jax.Array


def measure_signal(intermediates: Mapping[str, jax.Array]) -> Signal:
    """Measure the tokens at every stage of a transformer.

    Args:
      intermediates: what `ViT` returns with `return_intermediates`; arrays `[B, N, F]` under
        `tokens`, `block_i/attended` and `block_i/output`.

    Returns:
      The measures, with the batch as their first axis.

    Example:
      >>> import jax.numpy as jnp
      >>> names = ("tokens", "block_0/attended", "block_0/output")
      >>> signal = measure_signal({name: jnp.eye(3)[None] for name in names})
      >>> signal.spectrum.shape, signal.attention_kept.tolist()
      ((1, 3, 3), [[1.0]])
    """
    stages = [intermediates["tokens"]]
    while (name := f"block_{len(stages) // 2}/output") in intermediates:
        stages += [intermediates[name.replace("output", "attended")], intermediates[name]]
    tokens = jnp.stack(stages, axis=1)
    rank = effective_rank(tokens)
    kept = jnp.cumprod(rank[:, 1::2] / rank[:, :-1:2], axis=1)
    return Signal(kernel_spectrum(tokens), rank, mean_cosine(tokens), kept)


def _singular_values(matrix: jax.Array) -> jax.Array:
    return jnp.linalg.svd(_unit_scale(matrix), compute_uv=False)


def _unit_scale(matrix: jax.Array) -> jax.Array:
    """The matrix over its largest entry: its squares neither overflow nor vanish."""
    matrix = matrix.astype(compute_dtype(matrix))
    return matrix / jnp.max(jnp.abs(matrix), axis=(-2, -1), keepdims=True)
