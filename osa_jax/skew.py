r"""Skew-symmetric scores ``S = alpha / sqrt(D) (Q K^T - K Q^T)`` and what they are made of.

With ``M = [Q, K]`` and ``J = [[0, I], [-I, 0]]`` the scores are ``S = c M J M^T``, ``c = alpha / sqrt(D)``.

Shapes: ``N`` tokens, ``H`` heads, ``D`` query-key width, ``R = 2D``.
"""

import math

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from osa_jax.linalg import compute_dtype, exponent, mm, power_of_two, scaled, tmm, transpose


def symplectic_form(size: int, dtype: DTypeLike = jnp.float32) -> Array:
    r"""``J = [[0, I], [-I, 0]]``, the skew-symmetric matrix behind the scores.

    Args:
      size: R, an even number.
      dtype: of the result.

    Returns:
      J ``[R, R]``.

    Raises:
      ValueError: if `size` is odd or negative.

    Example:
      >>> symplectic_form(2)
      Array([[ 0.,  1.],
             [-1.,  0.]], dtype=float32)
    """
    if size < 0 or size % 2:
        raise ValueError(f"size must be even (R = 2D, queries and keys side by side), got {size}")
    eye = jnp.eye(size // 2, dtype=dtype)
    zero = jnp.zeros_like(eye)
    return jnp.block([[zero, eye], [-eye, zero]])


def skew_form(m: Array) -> Array:
    r"""``M J M^T = Q K^T - K Q^T`` for ``M = [Q, K]``, skew to the last bit.

    Args:
      m: ``[..., N, R]`` with R even.

    Returns:
      ``[..., N, N]`` in `m`'s dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> skew_form(jnp.array([[1.0, 0.0], [0.0, 2.0]], jnp.float32))
      Array([[ 0.,  2.],
             [-2.,  0.]], dtype=float32)
    """
    q, k = jnp.split(m, 2, axis=-1)
    product = mm(q, transpose(k))
    return product - transpose(product)


def gram(m: Array) -> Array:
    r"""The Gram matrix ``G = M^T M``, all that the scores' exponential needs to know of the tokens.

    Args:
      m: ``[..., N, R]``.

    Returns:
      ``[..., R, R]`` in `m`'s dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> gram(jnp.array([[1.0, 2.0], [0.0, 1.0]], jnp.float32))
      Array([[1., 2.],
             [2., 5.]], dtype=float32)
    """
    return tmm(m, m)


def query_key_matrix(query: Array, key: Array, alpha: ArrayLike, mask: Array | None = None) -> tuple[Array, Array]:
    r"""M = [Q, K] by head and the c of ``S = c M J M^T``, scaled so that no product of M overflows.

    Args:
      query: ``[..., N, H, D]``, any floating dtype.
      key: ``[..., N, H, D]``.
      alpha: scalar or ``[H]``.
      mask: boolean ``[..., N]`` of valid tokens; the rows of the others are zero.

    Returns:
      M ``[..., H, N, R]`` with entries below 1 (divided by a power of two, which is exact), and c ``[..., H]``
      with that power in it; both in float32 at least. c is cut off at finfo.max^(3/4), far beyond
      ``||S|| = 1 / eps``, where A has no correct digit left.

    Raises:
      ValueError: if the shapes do not fit, a width is 0, or a dtype is not floating point.

    Example:
      >>> import jax.numpy as jnp
      >>> q, k = jnp.full((3, 1, 4), 5.0, jnp.float32), jnp.full((3, 1, 4), 2.0, jnp.float32)
      >>> m, c = query_key_matrix(q, k, 1.0)
      >>> m.shape, float(m.max()), c  # 5 / 2^3 and 4^3 / sqrt(4)
      ((1, 3, 8), 0.625, Array([32.], dtype=float32))
    """
    alpha = jnp.asarray(alpha)
    check_query_key(query, key, alpha, mask)
    dtype = compute_dtype(query, key)
    m = jnp.moveaxis(jnp.concatenate([query.astype(dtype), key.astype(dtype)], -1), -2, -3)
    if mask is not None:
        m = jnp.where(mask[..., None, :, None], m, 0)
    top = jnp.max(jnp.abs(lax.stop_gradient(m)), (-2, -1), initial=0)
    limit = jnp.finfo(dtype).maxexp * 3 // 4
    power = jnp.maximum(exponent(jnp.where(jnp.isfinite(top), top, 0)), -limit // 3)
    m = scaled(power_of_two(-power, dtype), m)
    square = power_of_two(jnp.minimum(2 * power, limit), dtype)
    c = jnp.broadcast_to(alpha.astype(dtype) / math.sqrt(query.shape[-1]), square.shape) * square
    return m, jnp.clip(c, -(2.0**limit), 2.0**limit)


def check_query_key(query: Array, key: Array, alpha: Array, mask: Array | None) -> None:
    """Raises the ValueErrors of `query_key_matrix`."""
    for name, x in (("query", query), ("key", key), ("alpha", alpha)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be real floating point, got {x.dtype}: cast it first")
    if query.ndim < 3:
        raise ValueError(f"query must be [..., N, H, D] (tokens, heads, width), got shape {query.shape}")
    if query.shape[-3:-2] != key.shape[-3:-2]:
        raise ValueError(
            f"query and key must have the same number of tokens, got {query.shape} and {key.shape}: A is a "
            "rotation of one set of tokens, so there is no orthogonal cross attention"
        )
    if query.shape != key.shape:
        raise ValueError(f"key must have query's shape {query.shape}, got {key.shape}")
    if query.shape[-1] == 0 or query.shape[-2] == 0:
        raise ValueError(f"query must have at least one head and a width of 1, got shape {query.shape}")
    if alpha.shape not in ((), query.shape[-2:-1]):
        raise ValueError(f"alpha must be a scalar or one number per head [{query.shape[-2]}], got shape {alpha.shape}")
    if mask is not None and (mask.dtype != jnp.bool_ or mask.shape != query.shape[:-2]):
        raise ValueError(
            f"mask must be a boolean array {query.shape[:-2]} of valid tokens ([..., N], as the leading axes of "
            f"query), got {mask.dtype}{list(mask.shape)}: attention masks over pairs of tokens, causal ones among "
            "them, have no orthogonal counterpart"
        )


def skew_scores(query: Array, key: Array, *, alpha: ArrayLike = 1.0) -> Array:
    r"""The dense scores ``S = alpha / sqrt(D) (Q K^T - K Q^T)`` of every head.

    Args:
      query: ``[..., N, H, D]``, any floating dtype.
      key: ``[..., N, H, D]``.
      alpha: scalar or ``[H]``.

    Returns:
      S ``[..., H, N, N]``, in float32 at least.

    Raises:
      ValueError: if the shapes do not fit, a width is 0, or a dtype is not floating point.

    Example:
      >>> import jax.numpy as jnp
      >>> q, k = jnp.array([[[[1.0]], [[0.0]]], [[[0.0]], [[2.0]]]], jnp.float32)  # N = 2, H = D = 1
      >>> skew_scores(q, k, alpha=0.5)
      Array([[[ 0.,  1.],
              [-1.,  0.]]], dtype=float32)

    Reference: Zhang & Martens 2026, section 2.
    """
    m, c = query_key_matrix(query, key, alpha)
    return scaled(c, skew_form(m))
