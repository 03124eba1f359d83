"""Orthonormal bases of a matrix's column space, with hand-written derivatives in both modes.

`qr_basis` is the exact basis, `newton_schulz_basis` the one that needs products alone: a polynomial
in the small Gram matrix, so that the tokens are read once whatever the number of iterations.

A basis has no derivative where `m` loses column rank (a basis vector of a lost direction is
arbitrary), and its derivative grows without bound close by. `exp(S)` does not have this problem:
`orthogonal_attention` therefore carries one rule for the whole operator and never differentiates a
QR basis.

Shapes: `N` tokens, `R` columns, any leading batch axes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from osa_jax.autodiff import custom_vjp
from osa_jax.coefficients import Coefficients, Step, Steps, iteration_steps
from osa_jax.linalg import at_least_float32, mm

Pair = tuple[Array, Array]
Triple = tuple[Array, Array, Array]


class QRBasis(NamedTuple):
    """`m = basis @ triangular`, with K = min(N, R): `[..., N, K]` and `[..., K, R]`."""

    basis: Array
    triangular: Array


def qr_basis(m: ArrayLike) -> QRBasis:
    r"""The reduced QR factorisation, made unique (at full rank) by a non-negative diagonal.

    $$ M = B T, \quad B^\top B = I, \quad T \text{ upper triangular}, \quad T_{ii} \ge 0. $$

    A column that depends on the ones before it (`T_ii = 0`) still gets a unit vector in the basis,
    but an arbitrary one: the derivative does not exist there, and what comes back is infinite, NaN
    or, after rounding, large and meaningless.

    Args:
      m: `[..., N, R]`, real floating. Below float32 the computation runs in float32 and the results
        are rounded once. If N < R, the first N columns have to be independent for a derivative.

    Returns:
      `basis` `[..., N, K]` and `triangular` `[..., K, R]`, K = min(N, R), in the dtype of `m`.

    Raises:
      ValueError: if `m` is not a floating array of at least two axes.

    Example:
      >>> m = jnp.array([[-3.0, 1.0], [4.0, 2.0]])
      >>> basis, triangular = qr_basis(m)
      >>> triangular.round(3).tolist(), bool(jnp.allclose(basis @ triangular, m))
      ([[5.0, 1.0], [0.0, 2.0]], True)

    References:
      The basis of the paper's section 4 (Zhang & Martens, 2026); its derivative: Roberts & Roberts,
      "QR and LQ decomposition matrix backpropagation algorithms", 2020.
    """
    m, dtype = _as_matrix(m, "m")
    rows, columns = m.shape[-2:]
    # A wide matrix is its leading square block and, in that block's basis, the other columns.
    basis, triangular = _qr(m[..., : min(rows, columns)])
    if rows < columns:
        rest = mm(basis.mT, m[..., rows:])
        triangular = jnp.concatenate([triangular, rest], axis=-1)
    return QRBasis(basis.astype(dtype), triangular.astype(dtype))


@custom_vjp
def _qr(m: Array) -> tuple[Array, Array]:
    """`qr_basis` for N >= R."""
    basis, triangular = jnp.linalg.qr(m)
    diagonal = jnp.diagonal(triangular, axis1=-2, axis2=-1)
    sign = 1 - 2 * (diagonal < 0).astype(m.dtype)  # 1 at zero, or the column would vanish
    return basis * sign[..., None, :], triangular * sign[..., :, None]


# M = B T. With C = dM T^-1 = dB + B dT T^-1 and W = B^T C: B^T dB is skew and dT T^-1 is upper
# triangular, so W's strictly lower part L belongs to the skew one, B^T dB = L - L^T, which leaves
#
#     dT = U T,   U = triu(W) + L^T,   dB = C - B U.
#
# The adjoint, with copyltu(X) = tril(X) + tril(X, -1)^T:
#
#     Mbar = [Bbar + B copyltu(T Tbar^T - Bbar^T B)] T^-T
#
# If N < R, with Y the other columns, the plain derivative of V = B^T Y completes the rule: Bbar
# gains Y Vbar^T, and Ybar = B Vbar.


def _qr_fwd(m: Array) -> tuple[Pair, Pair]:
    basis, triangular = _qr(m)
    return (basis, triangular), (basis, triangular)


def _qr_jvp(residuals: Pair, tangents: tuple[Array]) -> Pair:
    basis, triangular = residuals
    c = _solve_right(tangents[0], triangular)
    w = mm(basis.mT, c)
    u = jnp.triu(w) + jnp.tril(w, -1).mT
    return c - mm(basis, u), mm(u, triangular)


def _qr_bwd(residuals: Pair, cotangents: Pair) -> tuple[Array]:
    basis, triangular = residuals
    basis_bar, triangular_bar = cotangents
    x = mm(triangular, triangular_bar.mT) - mm(basis_bar.mT, basis)
    copyltu = jnp.tril(x) + jnp.tril(x, -1).mT
    return (_solve_right(basis_bar + mm(basis, copyltu), triangular, transpose=True),)


_qr.defvjp(_qr_fwd, _qr_bwd)
_qr.defjvp(_qr_jvp)


def _solve_right(x: Array, triangular: Array, *, transpose: bool = False) -> Array:
    """`x @ inv(triangular)`, or with the inverse transposed."""
    return jax.lax.linalg.triangular_solve(triangular, x, left_side=False, transpose_a=transpose)


def newton_schulz_basis(
    m: ArrayLike, *, num_iters: int | None = None, coefficients: Coefficients | None = None
) -> Array:
    r"""The orthogonal polar factor of a matrix by Newton-Schulz iterations, products alone.

    $$ M_0 = M / \|M\|_F, \quad M_{k+1} = M_k (a_k I + b_k M_k^\top M_k + c_k (M_k^\top M_k)^2),
       \quad B = M_K, $$

    evaluated as `m @ newton_schulz_polynomial(m^T m)`: one pass over N instead of K. For finite K
    the singular values only approach 1 (from below with "cubic"), the later the smaller they are in
    `M_0`: see the table at `newton_schulz_polynomial`. Where they are zero they stay zero, and the
    zero matrix, divided by 1 instead of its norm, gives zero. In the Gram form rounding is an error
    of about `eps / sigma^2` for a singular value `sigma` of `M_0`.

    Args:
      m: `[..., N, R]`, real floating, of any finite scale. Below float32 the computation runs in
        float32 and the result is rounded once.
      num_iters: number of iterations K, at least 1. The default brings singular values from 1e-3
        to 1: 21 for "cubic", 8 for "polar_express".
      coefficients: "cubic" (a, b, c = 3/2, -1/2, 0 in each step, the paper's) or "polar_express"
        (a table for singular values in [1e-3, 1], the default).

    Returns:
      `B` `[..., N, R]` in the dtype of `m`: `B^T B` is near I if N >= R, else `B B^T`.

    Raises:
      ValueError: if `m` is not a floating array of at least two axes, `num_iters` not a positive
        integer, or `coefficients` not the name of a set that converges.

    Example:
      >>> newton_schulz_basis([[0.0, 2.0], [-3.0, 0.0], [0.0, 0.0]]).round(3).tolist()
      [[0.0, 1.0], [-1.0, 0.0], [0.0, 0.0]]

    References:
      Zhang & Martens (2026), section 4; Amsel, Persson, Musco & Gower, "The Polar Express", 2025.
    """
    steps = iteration_steps(num_iters, coefficients)
    m, dtype = _as_matrix(m, "m")
    if m.shape[-2] < m.shape[-1]:  # the smaller of the two Gram matrices, the one of full rank
        return _tall_basis(_unit_scale(m).mT, steps=steps).mT.astype(dtype)
    return _tall_basis(_unit_scale(m), steps=steps).astype(dtype)


def _unit_scale(m: Array) -> Array:
    """`m` with entries near 1: the basis is the same, and no square overflows or vanishes."""
    tiny = jnp.finfo(m.dtype).tiny
    largest = jnp.max(jnp.abs(m), axis=(-2, -1), keepdims=True, initial=0)
    scale = jnp.where(largest < tiny, 1, jnp.minimum(largest, 1 / tiny))
    return m / jax.lax.stop_gradient(scale)


@custom_vjp(nondiff_argnames=("steps",))
def _tall_basis(m: Array, *, steps: Steps) -> Array:
    return mm(m, _gram_polynomial(mm(m.mT, m), steps=steps))


# B = M W with W = w(G), G = M^T M, hence, with `_differential` and `_adjoint` those of w:
#
#     dB = dM W + M dW,   dG = M^T dM + (M^T dM)^T
#     Wbar = M^T Bbar,    Mbar = Bbar W^T + M (Gbar + Gbar^T)


def _tall_basis_fwd(m: Array, *, steps: Steps) -> tuple[Array, Triple]:
    gram = mm(m.mT, m)
    polynomial = _gram_polynomial(gram, steps=steps)
    return mm(m, polynomial), (m, gram, polynomial)


def _tall_basis_jvp(residuals: Triple, tangents: tuple[Array], *, steps: Steps) -> Array:
    (m, gram, polynomial), (m_dot,) = residuals, tangents
    half = mm(m.mT, m_dot)
    polynomial_dot = _differential(gram, polynomial, half + half.mT, steps)
    return mm(m_dot, polynomial) + mm(m, polynomial_dot)


def _tall_basis_bwd(residuals: Triple, basis_bar: Array, *, steps: Steps) -> tuple[Array]:
    m, gram, polynomial = residuals
    gram_bar = _adjoint(gram, polynomial, mm(m.mT, basis_bar), steps)
    return (mm(basis_bar, polynomial.mT) + mm(m, gram_bar + gram_bar.mT),)


_tall_basis.defvjp(_tall_basis_fwd, _tall_basis_bwd)
_tall_basis.defjvp(_tall_basis_jvp)


def newton_schulz_polynomial(
    gram: ArrayLike, *, num_iters: int | None = None, coefficients: Coefficients | None = None
) -> Array:
    r"""The matrix `W(G)` with `M W(M^T M)` the Newton-Schulz basis of `M`, near `G^(-1/2)`.

    $$ W = P_K / f, \quad f = \|M\|_F = \sqrt{\mathrm{tr}\, G},
       \quad R_0 = G / f^2, \quad P_0 = I, $$
    $$ Z_k = a_k I + b_k R_k + c_k R_k^2, \quad P_{k+1} = P_k Z_k, \quad R_{k+1} = Z_k R_k Z_k. $$

    The largest `|1 - sigma|` left for singular values of `M / f` in [l, 1]:

    | l    | cubic                              | polar_express         |
    |------|------------------------------------|-----------------------|
    | 1e-1 | K=8: 2e-3, K=10: 3e-11             | K=6: 1e-3, K=7: 4e-9  |
    | 1e-2 | K=12: 0.11, K=15: 2e-7             | K=6: 1e-3, K=7: 4e-9  |
    | 1e-3 | K=15: 0.58, K=20: 6e-5, K=21: 6e-9 | K=7: 4e-9, K=8: 2e-16 |

    Args:
      gram: `[..., R, R]`, symmetric and positive semi-definite, real floating; below float32 the
        computation runs in float32.
      num_iters: number of iterations K, as in `newton_schulz_basis`.
      coefficients: "cubic" or "polar_express", as in `newton_schulz_basis`.

    Returns:
      `W` `[..., R, R]` in the dtype of `gram`.

    Raises:
      ValueError: as `newton_schulz_basis`, and if `gram` is not square.

    Example:
      >>> newton_schulz_polynomial([[4.0, 0.0], [0.0, 1.0]]).round(3).tolist()
      [[0.5, 0.0], [0.0, 1.0]]

    References:
      Zhang & Martens (2026), section 4, rewritten for the Gram matrix.
    """
    steps = iteration_steps(num_iters, coefficients)
    gram, dtype = _as_matrix(gram, "gram")
    if gram.shape[-2] != gram.shape[-1]:
        raise ValueError(f"gram must be square, got shape {gram.shape}: give m.mT @ m")
    return _gram_polynomial(gram, steps=steps).astype(dtype)


@custom_vjp(nondiff_argnames=("steps",))
def _gram_polynomial(gram: Array, *, steps: Steps) -> Array:
    _, square, r = _normalise(gram)
    return gram_iteration(r, steps) / jnp.sqrt(square)


# W = t^(-1/2) p(R) with R = G / t, t = tr G, p the polynomial of the iteration. With L(R; E), the
# Frechet derivative of p:
#
#     dW = t^(-1/2) L(R; dR) - dt W / (2t),   dR = (dG - dt R) / t,   dt = tr dG.
#
# As p is a polynomial, the adjoint of L(R; .) is L(R^T; .), the same recursion; no intermediate of
# the loop is stored for the reverse pass:
#
#     Rbar = t^(-1/2) L(R^T; Wbar),   tbar = -<R, Rbar> / t - <W, Wbar> / (2t),
#     Gbar = Rbar / t + tbar I.
#
# Where G = 0, t stands for the constant 1: dt = tbar = 0.


def _differential(gram: Array, polynomial: Array, gram_dot: Array, steps: Steps) -> Array:
    nonzero, square, r = _normalise(gram)
    square_dot = jnp.where(nonzero, _trace(gram_dot), 0)
    r_dot = (gram_dot - square_dot * r) / square
    return _frechet(r, r_dot, steps) / jnp.sqrt(square) - square_dot / (2 * square) * polynomial


def _adjoint(gram: Array, polynomial: Array, polynomial_bar: Array, steps: Steps) -> Array:
    nonzero, square, r = _normalise(gram)
    r_bar = _frechet(r.mT, polynomial_bar, steps) / jnp.sqrt(square)
    square_bar = -(_inner(r, r_bar) + _inner(polynomial, polynomial_bar) / 2) / square
    return r_bar / square + jnp.where(nonzero, square_bar, 0) * _identity(r)


def _gram_polynomial_fwd(gram: Array, *, steps: Steps) -> tuple[Array, Pair]:
    polynomial = _gram_polynomial(gram, steps=steps)
    return polynomial, (gram, polynomial)


def _gram_polynomial_jvp(residuals: Pair, tangents: tuple[Array], *, steps: Steps) -> Array:
    return _differential(*residuals, *tangents, steps)


def _gram_polynomial_bwd(residuals: Pair, bar: Array, *, steps: Steps) -> tuple[Array]:
    return (_adjoint(*residuals, bar, steps),)


_gram_polynomial.defvjp(_gram_polynomial_fwd, _gram_polynomial_bwd)
_gram_polynomial.defjvp(_gram_polynomial_jvp)


# Rounding can turn the smallest eigenvalues of a Gram matrix negative, and from there the iteration
# diverges. R therefore starts `_shift` higher, about the rounding error of a matrix of trace 1. The
# last step takes R_{K-1} = P R_0 P from the matrix without the shift, which corrects what the shift
# and the rounding so far have changed.


def gram_iteration(r0: Array, steps: Steps) -> Array:
    """The polynomial `P(R_0)` after some steps, for a Gram matrix `R_0` with eigenvalues in [0, 1]."""
    p, r = jnp.zeros_like(r0) + _identity(r0), r0 + _shift(r0)
    for step in steps[:-1]:
        z = _quadratic(r, step)
        p, r = mm(p, z), mm(z, mm(r, z))
    r = mm(p, mm(r0, p))
    return mm(p, _quadratic(r, steps[-1]))


def _frechet(r0: Array, r0_dot: Array, steps: Steps) -> Array:
    """The derivative of `gram_iteration` at `r0` in the direction `r0_dot`, rule by rule."""
    p, r = jnp.zeros_like(r0) + _identity(r0), r0 + _shift(r0)
    p_dot, r_dot = jnp.zeros_like(r0), r0_dot
    for step in steps[:-1]:
        z, z_dot = _quadratic(r, step), _quadratic_dot(r, r_dot, step)
        y, y_dot = mm(r, z), _product_dot(r, r_dot, z, z_dot)
        p_dot, p = _product_dot(p, p_dot, z, z_dot), mm(p, z)
        r_dot, r = _product_dot(z, z_dot, y, y_dot), mm(z, y)
    y, y_dot = mm(r0, p), _product_dot(r0, r0_dot, p, p_dot)
    r, r_dot = mm(p, y), _product_dot(p, p_dot, y, y_dot)
    z, z_dot = _quadratic(r, steps[-1]), _quadratic_dot(r, r_dot, steps[-1])
    return _product_dot(p, p_dot, z, z_dot)


def _quadratic(r: Array, step: Step) -> Array:
    a, b, c = step
    linear = a * _identity(r) + b * r
    return linear + c * mm(r, r) if c else linear


def _quadratic_dot(r: Array, r_dot: Array, step: Step) -> Array:
    _, b, c = step
    return b * r_dot + c * _product_dot(r, r_dot, r, r_dot) if c else b * r_dot


def _product_dot(x: Array, x_dot: Array, y: Array, y_dot: Array) -> Array:
    return mm(x_dot, y) + mm(x, y_dot)


def _shift(r: Array) -> Array:
    return jnp.finfo(r.dtype).eps * _identity(r)


def _identity(like: Array) -> Array:
    """`[1, ..., 1, R, R]`: left to broadcast, so that it takes any sharding of the batch axes."""
    eye = jnp.eye(like.shape[-1], dtype=like.dtype)
    return eye.reshape((1,) * (like.ndim - 2) + eye.shape)


def _normalise(gram: Array) -> Triple:
    """Whether `gram` is not zero, its trace (1 if it is zero), and `gram / trace`."""
    trace = _trace(gram)
    nonzero = trace != 0
    square = jnp.where(nonzero, trace, 1)
    return nonzero, square, gram / square


def _trace(x: Array) -> Array:
    return jnp.trace(x, axis1=-2, axis2=-1)[..., None, None]


def _inner(x: Array, y: Array) -> Array:
    return jnp.sum(x * y, axis=(-2, -1), keepdims=True)


def _as_matrix(x: ArrayLike, name: str) -> tuple[Array, jnp.dtype]:
    """The argument in the dtype to compute in, and its own."""
    x = jnp.asarray(x)
    if x.ndim < 2:
        raise ValueError(f"{name} must be a matrix [..., rows, columns], got shape {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be real floating, got {x.dtype}: use .astype(jnp.float32)")
    return x.astype(at_least_float32(x.dtype)), x.dtype
