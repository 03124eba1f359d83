r"""Exponentials of small skew-symmetric matrices, by matrix products only, with their derivatives.

Shapes: ``R`` matrix size; every leading axis is a batch axis.

Everything here is one function of a skew matrix X and a symmetric matrix P,

    Psi(X, P) = phi_1(X P) X = sum_k (X P)^k X / (k+1)!,        phi_1(z) = (e^z - 1) / z,

because for any B with ``B^T B = P``:  ``exp(B X B^T) = I + B Psi B^T``. With P = I it is ``exp(X) - I``.

Evaluation: Psi is computed for X / 2^s from the Taylor series of degree 12 and doubled s times,

    Psi  <-  2 Psi + Psi P Psi            ((I + B Psi B^T)^2 = I + B (2 Psi + Psi P Psi) B^T).

Working with exp - I keeps the relative accuracy of small X, and s is rounded UP from a bound on the
norm of X P. Every few doublings one Newton step restores orthogonality, which the rounding errors of the
doublings leave: with E = A^T A - I = B D B^T, D = Psi + Psi^T + Psi^T P Psi,

    A <- A (I - E/2),                     Psi <- Psi - (D + Psi P D) / 2.

Derivatives: Psi is a sum of words in X and P whose coefficients depend on the length of the word alone.
Transposing a word reverses it, hence the adjoint of any derivative is a derivative at the transposed
point: for the variable Z (P, or X when P = I)

    < F, D^k Psi[E_1, .., E_{k-1}, E] >  =  < D^k Psi^T[E_1^T, .., E_{k-1}^T, F], E >,     Psi^T at (X^T, P^T).

The derivatives themselves follow the same series and doublings, differentiated, which is what `jax.jvp`
makes of them; the loop's trip count follows the largest norm in the batch, and reverse mode needs none of
its intermediates.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from osa_jax.autodiff import custom_vjp
from osa_jax.linalg import compute_dtype, exponent, eye_like, mm, power_of_two, scaled, transpose

DOUBLINGS_PER_POLISH = 8


def _ldexp(x: Array, exponent: Array) -> Array:
    """x 2^exponent by matrix of the batch, in two steps that neither overflow nor underflow alone."""
    half = exponent // 2
    first, second = power_of_two(half, x.dtype), power_of_two(exponent - half, x.dtype)
    return scaled(second, scaled(first, x))


def _max(x: Array) -> Array:
    """The largest entry of each matrix; 0 where it is not finite, so that one bad matrix does not set
    the trip count of all."""
    top = jnp.max(lax.stop_gradient(x), (-2, -1), initial=0)
    return jnp.where(jnp.isfinite(top), top, 0)


def _norm(x: Array) -> Array:
    return _max(jnp.sum(jnp.abs(x), -2, keepdims=True))


def _below_one(x: Array) -> tuple[Array, Array]:
    """``x 2^-k`` and the least k >= 0 that brings every entry below 1, so that no power overflows. (Small
    matrices are left alone: their tangents need not be small.)"""
    k = jnp.maximum(exponent(_max(jnp.abs(x))), 0)
    return _ldexp(x, -k), k


def _series(x: Array, p: Array | None) -> tuple[Array, Array]:
    """Psi(X / 2^s, P) and s, from the Taylor series of phi_1 to degree 11 in seven products.

    With Y = X P and d_j = ||Y^j||_1^(1/j) the truncated part is bounded by max(d_3, d_4) in place of ||Y||_1
    (Al-Mohy and Higham 2009, Theorem 4.2), which for a normal matrix is close to the spectral norm; ||Y||_1
    itself is kept below 16 theta, for the rounding errors of the powers when Y is far from normal.
    """
    theta = 0.2996 if x.dtype == jnp.float64 else 1.46
    x, x_shift = _below_one(x)
    y, y_shift = _below_one(x if p is None else mm(x, p))
    y2 = mm(y, y)
    y3, y4 = mm(y, y2), mm(y2, y2)
    bound = jnp.maximum(jnp.cbrt(_norm(y3)), jnp.sqrt(jnp.sqrt(_norm(y4))))
    bound = jnp.maximum(bound, _norm(y) / 16)
    s = jnp.maximum(x_shift + y_shift + exponent(bound / theta), 0)
    shift = x_shift + y_shift - s
    y, y2, y3, y4 = (_ldexp(y_j, j * shift) for j, y_j in ((1, y), (2, y2), (3, y3), (4, y4)))
    eye = eye_like(y)
    c = [1 / math.factorial(j + 1) for j in range(12)]

    def cubic(j: int) -> Array:
        return c[j] * eye + c[j + 1] * y + c[j + 2] * y2 + c[j + 3] * y3

    phi = cubic(0) + mm(y4, cubic(4) + mm(y4, cubic(8)))
    return mm(phi, _ldexp(x, x_shift - s)), s


def _double(psi: Array, p: Array | None) -> Array:
    return 2 * psi + mm(psi, psi if p is None else mm(p, psi))


def _polish(psi: Array, p: Array | None) -> Array:
    """One Newton step towards orthogonality. The correction is zero but for rounding: a constant."""
    psi_0, p = lax.stop_gradient((psi, p))
    d = psi_0 + transpose(psi_0) + mm(transpose(psi_0), psi_0 if p is None else mm(p, psi_0))
    return psi - (d + mm(psi_0, d if p is None else mm(p, d))) / 2


def _psi(x: Array, p: Array | None) -> Array:
    psi, s = _series(x, p)
    trips = jnp.max(s, initial=0)

    def where(active: Array, new: Array, old: Array) -> Array:
        return jnp.where(active[..., None, None], new, old)

    def block(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        start, psi = carry
        stop = jnp.minimum(start + DOUBLINGS_PER_POLISH, trips)

        def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            i, psi = carry
            return i + 1, where(i < s, _double(psi, p), psi)

        _, psi = lax.while_loop(lambda carry: carry[0] < stop, step, (start, psi))
        return stop, where(start < s, _polish(psi, p), psi)

    return lax.while_loop(lambda carry: carry[0] < trips, block, (jnp.zeros_like(trips), psi))[1]


def _differentiable(function: Callable[..., Array]) -> custom_vjp:
    """D^k function(z, const)[e_1, .., e_k] as a `custom_vjp`, for functions that are sums of words in z and
    const: see the module's docstring. `const` is not differentiated."""

    @custom_vjp
    def derivative(z: Array, const: Array | None, *directions: Array) -> Array:
        along = functools.partial(function, const=const)
        for e in directions:
            along = functools.partial(lambda f, e, z: jax.jvp(f, (z,), (e,))[1], along, e)
        return along(z)

    def fwd(z: Array, const: Array | None, *directions: Array) -> tuple[Array, tuple]:
        # Through the rule again, not `along(z)`: second order must not meet the loop in reverse.
        return derivative(z, const, *directions), (z, const, directions)

    def jvp(residuals: tuple, tangents: tuple) -> Array:
        z, const, directions = residuals
        z_dot, _, *directions_dot = tangents
        out = derivative(z, const, *directions, z_dot)
        for i, e_dot in enumerate(directions_dot):
            out = out + derivative(z, const, *directions[:i], e_dot, *directions[i + 1 :])
        return out

    def bwd(residuals: tuple, cotangent: Array) -> tuple:
        z, const, directions = jax.tree.map(transpose, residuals)
        rest = [(*directions[:i], *directions[i + 1 :]) for i in range(len(directions))]
        by_direction = [derivative(z, const, *others, cotangent) for others in rest]
        return derivative(z, const, *directions, cotangent), None, *by_direction

    derivative.defvjp(fwd, bwd)
    derivative.defjvp(jvp)
    return derivative


# exp(z) - I and psi(z) = phi_1(const z) const, to be used inside other differentiable functions: without the
# public functions' checks and casts.
expm1 = _differentiable(lambda z, const: _psi(z, None))
phi = _differentiable(lambda z, const: _psi(const, z))


def _floor(*arrays: Array) -> list[Array]:
    """All in one dtype, at least float32: linear algebra is never done below it."""
    dtype = compute_dtype(*arrays)
    return [a.astype(dtype) for a in arrays]


def _check_square(name: str, x: Array) -> None:
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise ValueError(f"{name} must be a (batch of) square matrices [..., R, R], got shape {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be real floating point, got {x.dtype}: cast it first")


def _check_same_shape(name: str, x: Array, other: str, y: Array) -> None:
    _check_square(name, x)
    if x.shape != y.shape:
        raise ValueError(f"{name} must have the shape of {other}, {y.shape}, got {x.shape}")


@jax.jit
def expm_skew(x: Array) -> Array:
    r"""The exponential of skew-symmetric matrices, a rotation: ``exp(X) = sum_k X^k / k!``.

    By products only, accurate to a few ``eps (1 + ||X||)`` at any norm: scaling is rounded up and orthogonality
    restored on the way. Differentiable in both modes to any order.

    Args:
      x: skew-symmetric matrices ``[..., R, R]`` of any floating dtype; symmetric parts are not removed.

    Returns:
      ``exp(x)`` of the same shape and dtype, computed in float32 at least.

    Raises:
      ValueError: if `x` is not a batch of square, floating-point matrices.

    Example:
      >>> import jax.numpy as jnp
      >>> expm_skew(jnp.array([[0.0, jnp.pi / 2], [-jnp.pi / 2, 0.0]], jnp.float32)).round(3) + 0.0
      Array([[ 0.,  1.],
             [-1.,  0.]], dtype=float32)

    Reference: Zhang & Martens 2026, section 2; Bader, Blanes & Casas 2019 for the degree.
    """
    _check_square("x", x)
    (x_up,) = _floor(x)
    return (eye_like(x_up) + expm1(x_up, None)).astype(x.dtype)


@jax.jit
def expm_skew_frechet(x: Array, direction: Array) -> Array:
    r"""The derivative of `expm_skew` along a direction: ``L(X, E) = int_0^1 e^(sX) E e^((1-s)X) ds``.

    Its adjoint is itself with the sign of X flipped, ``<F, L(X, E)> = <L(-X, F), E>``.

    Args:
      x: skew-symmetric matrices ``[..., R, R]``.
      direction: matrices ``[..., R, R]``, not necessarily skew.

    Returns:
      ``L(x, direction)`` in `direction`'s dtype, computed in float32 at least.

    Raises:
      ValueError: if the arguments are not square, floating-point matrices of one shape.

    Example:
      >>> import jax.numpy as jnp
      >>> expm_skew_frechet(jnp.zeros((2, 2), jnp.float32), jnp.array([[0.0, 3.0], [-3.0, 0.0]], jnp.float32))
      Array([[ 0.,  3.],
             [-3.,  0.]], dtype=float32)
    """
    _check_square("x", x)
    _check_same_shape("direction", direction, "x", x)
    x_up, e = _floor(x, direction)
    return expm1(x_up, None, e).astype(direction.dtype)


@jax.jit
def phi_skew(gram: Array, form: Array) -> Array:
    r"""The matrix Psi with ``exp(B X B^T) = I + B Psi B^T`` for every B with ``B^T B = P``.

    ``Psi = phi_1(X P) X = sum_k (X P)^k X / (k+1)!`` with ``phi_1(z) = (e^z - 1) / z``: no condition on the
    rank of P, no division.

    Args:
      gram: symmetric positive semi-definite ``P = B^T B``, ``[..., R, R]``.
      form: skew-symmetric X of the same shape. It is a constant of the map: gradients stop here.

    Returns:
      Psi ``[..., R, R]`` in `gram`'s dtype, computed in float32 at least.

    Raises:
      ValueError: if the arguments are not square, floating-point matrices of one size.

    Example:
      >>> import jax.numpy as jnp
      >>> from osa_jax.skew import symplectic_form
      >>> b = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
      >>> j = symplectic_form(2)
      >>> rotation = jnp.eye(3) + b @ phi_skew(b.T @ b, j) @ b.T
      >>> bool(jnp.allclose(rotation, expm_skew(b @ j @ b.T), atol=1e-6))
      True

    Reference: Zhang & Martens 2026, Theorem 2.1, without its basis.
    """
    _check_square("gram", gram)
    _check_same_shape("form", form, "gram", gram)
    return phi(*_floor(gram, form)).astype(gram.dtype)


@jax.jit
def phi_skew_frechet(gram: Array, form: Array, direction: Array) -> Array:
    r"""The derivative of `phi_skew` by P along a direction.

    ``<F, L_X(P; E)> = <L_{-X}(P; F), E>`` for symmetric P and skew X: the adjoint is the map itself with the
    sign of X flipped, because ``exp(S)^T = exp(-S)``.

    Args:
      gram: symmetric positive semi-definite P, ``[..., R, R]``.
      form: skew-symmetric X of the same shape.
      direction: E of the same shape, any matrix.

    Returns:
      ``d/dt phi_skew(P + t E, X)`` at t = 0, in `direction`'s dtype, computed in float32 at least.

    Raises:
      ValueError: if the arguments are not square, floating-point matrices of one shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from osa_jax.skew import symplectic_form
      >>> zero, eye = jnp.zeros((2, 2), jnp.float32), jnp.eye(2, dtype=jnp.float32)
      >>> phi_skew_frechet(zero, symplectic_form(2), eye)  # J E J / 2
      Array([[-0.5,  0. ],
             [ 0. , -0.5]], dtype=float32)
    """
    _check_square("gram", gram)
    _check_same_shape("form", form, "gram", gram)
    _check_same_shape("direction", direction, "gram", gram)
    p, x, e = _floor(gram, form, direction)
    return phi(p, x, e).astype(direction.dtype)
