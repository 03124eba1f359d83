"""Largest singular values and polar factors of ill-conditioned matrices, by products alone.

Both work on the small Gram matrix, whose rounding hides singular values below `sqrt(eps)` of the
largest. The polar factor therefore comes in passes of a few steps: each raises what its Gram matrix
hides by a factor of some hundreds, and the next sees it in a new Gram matrix. More steps in a pass
would cost no more, but they amplify the rounding of its Gram matrix by the square of that factor.

Shapes: matrices `[..., F, D]`; every leading axis is a batch axis.
"""

import jax.numpy as jnp
from jax import Array

from osa_jax.bases import gram_iteration
from osa_jax.linalg import mm, tmm, transpose

SQUARINGS = 17
"""G^(2^17): where singular values crowd just below the largest, an error of 4e-6 of it is left."""

# Muon's coefficients, which never converge: twelve times they multiply 1e-6 by 3.4 and keep everything
# larger within [0.68, 1.21]. Faster steps send some singular values near 1 to very small ones on their
# way, and lose their directions to rounding. Three steps of order three then end at 1.
_GROW, _END = (3.4445, -4.7750, 2.0315), (1.875, -1.25, 0.375)
_PASSES = ((_GROW,) * 5, (_GROW,) * 5, (_GROW,) * 2 + (_END,) * 3)


def scaled_polar(w: Array) -> Array:
    r"""`sigma_max(W) U` with the polar factor U of a matrix, `W = U H`.

    Args:
      w: `[..., F, D]`, float32 or float64. Singular values down to 1e-6 of the largest count;
        in a direction below that, as in one the matrix does not have, U is whatever rounding makes of
        it, of norm 1 at most.

    Returns:
      An array like `w`: finite, and zero for the zero matrix.

    Example:
      >>> c = scaled_polar(jnp.array([[0.0, 2.0], [-3.0, 0.0], [0.0, 0.0]]))
      >>> bool(jnp.allclose(c, jnp.array([[0.0, 3.0], [-3.0, 0.0], [0.0, 0.0]])))
      True

    References:
      Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, has the coefficients.
    """
    if w.shape[-2] < w.shape[-1]:
        return transpose(scaled_polar(transpose(w)))
    largest = jnp.max(jnp.abs(w), axis=(-2, -1), keepdims=True)
    entry = jnp.where(largest > 0, largest, 1)
    x = w / entry
    gram = tmm(x, x)
    norm = largest_singular_value(gram)
    x = mm(x, gram_iteration(gram / norm**2, _PASSES[0]) / norm)
    for steps in _PASSES[1:]:
        x = mm(x, gram_iteration(tmm(x, x), steps))
    return entry * norm * x


def largest_singular_value(gram: Array) -> Array:
    r"""`sigma_max(M)` from `G = M^T M` by power iteration on all vectors at once, in repeated squares.

    $$ P = G^{2^k}, \quad \sigma_{\max}^2 \approx \mathrm{tr}(P G P) / \mathrm{tr}(P^2), $$

    which is never above it (but for rounding) and exact where all singular values are equal.

    Args:
      gram: `[..., D, D]`, symmetric and positive semi-definite.

    Returns:
      `[..., 1, 1]`; 1 for the zero matrix.

    Example:
      >>> float(largest_singular_value(jnp.diag(jnp.array([9.0, 8.9])))[0, 0])
      3.0
    """
    power = _unit_trace(gram)
    for _ in range(SQUARINGS):
        power = _unit_trace(mm(power, power))
    square = jnp.sum(power * mm(gram, power), axis=(-2, -1), keepdims=True)
    norm = jnp.sum(power * power, axis=(-2, -1), keepdims=True)
    return jnp.where(square > 0, jnp.sqrt(square / jnp.where(norm > 0, norm, 1)), 1)


def _unit_trace(x: Array) -> Array:
    trace = jnp.trace(x, axis1=-2, axis2=-1)[..., None, None]
    return x / jnp.where(trace > 0, trace, 1)
