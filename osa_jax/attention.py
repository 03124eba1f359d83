r"""Orthogonal self-attention: ``A V`` with ``A = exp(S)``, ``S = alpha / sqrt(D) (Q K^T - K Q^T)``.

Shapes: ``B`` batch, ``N`` tokens, ``H`` heads, ``D`` query-key width, ``R = 2D``, ``E`` value width.

The exact route, without a basis
--------------------------------
With ``M = [Q, K]`` and ``J = [[0, I], [-I, 0]]``, ``S = c M J M^T``. For any invertible U, ``B = M U^{-1}`` and
``X = U J U^T`` give ``S = c B X B^T`` and, since ``S^n = c^n B (X P)^(n-1) X B^T`` with ``P = B^T B``,

    exp(S) = I + B Psi B^T,        Psi = c psi(c P),    psi(Z) = phi_1(X Z) X        (expm.py).

No condition on the rank of M, two passes over the tokens, R x R work between them. U = I is enough in exact
arithmetic. In floating point the rounding of ``G = M^T M`` is amplified where ``J G`` is far from normal (Q and K
nearly parallel, a common mode), up to ``eps nu^2`` with ``nu = c ||M||^2``. The Cholesky factor of the shifted Gram
matrix, ``G + t tr(G) I = U^T U`` with t a few eps, makes B orthonormal but for the directions that M does not have,
which it damps: no decision about the rank, and an error of ``eps nu``, which no method can avoid.

One derivative rule for the operator
------------------------------------
S does not depend on U, so U is a constant and nothing is differentiated through a factorisation. With
``W = U^{-1}``, ``T = B^T V`` and L the derivative of psi at c P,

    dT = dB^T V + B^T dV,    dP = dB^T B + B^T dB,    dPsi = dc psi + c L(dc P + c dP),    dB = dM W
    dY = dV + dB (Psi T) + B (dPsi T + Psi dT)

and its adjoint, where L^* is L with the sign of X flipped because ``exp(S)^T = exp(-S)``:

    Tbar = Psi^T (B^T Ybar),    Psibar = (B^T Ybar) T^T,    Zbar = L^*(c Psibar),    Pbar = c Zbar
    Vbar = Ybar + B Tbar,       cbar = <Psibar, psi> + <Zbar, P>
    Mbar = (Ybar (Psi T)^T + V Tbar^T + B (Pbar + Pbar^T)) W^T.

The rule belongs to the whole operator: differentiating an orthonormal basis of M instead is wrong wherever M has no
full column rank (Q = K, repeated tokens, N < R), although the value is right there.
"""

import functools
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike

from osa_jax.autodiff import custom_vjp
from osa_jax.bases import newton_schulz_polynomial, qr_basis
from osa_jax.coefficients import Coefficients
from osa_jax.expm import expm1, expm_skew, phi
from osa_jax.linalg import compute_dtype, eye_like, mm, scaled, tmm, transpose
from osa_jax.skew import gram, query_key_matrix, skew_form

Method = Literal["exact", "qr", "newton_schulz", "dense", "auto"]


class _Frame(NamedTuple):
    """What the operator needs beside M, c and V: all R x R, of the frame B = M W."""

    inverse: Array  # W = U^{-1}
    form: Array  # X = U J U^T
    gram: Array  # P = B^T B
    psi: Array  # psi(c P)


Residuals = tuple[Array, Array, Array, _Frame, Array]


def _frame(m: Array, c: Array) -> tuple[Array, _Frame]:
    """The basis B and its frame, by one pass of shifted Cholesky."""
    lower = _shifted_cholesky(lax.stop_gradient(gram(m)))
    inverse = transpose(solve_triangular(lower, eye_like(lower), lower=True))
    form = skew_form(transpose(lower))
    basis = mm(m, inverse)
    p = gram(basis)
    return basis, _Frame(inverse, form, p, phi(scaled(c, p), form))


def _shifted_cholesky(g: Array) -> Array:
    """L with ``L L^T = G + t tr(G) I``.

    t = 16 eps covers the rounding errors of G and of the factorisation on every input tried; a matrix for
    which it does not (a sum over very many tokens in one accumulator) gets 64 times more until it does. G = 0 has
    L = I, and so has a G whose shift would underflow.
    """
    eye = eye_like(g)
    trace = jnp.trace(g, axis1=-2, axis2=-1)

    def failed(lower: Array) -> Array:
        return jnp.isfinite(trace) & ~jnp.all(jnp.isfinite(lower), (-2, -1))

    def factor(shift: Array) -> tuple[Array, Array]:
        return shift, jnp.linalg.cholesky(g + scaled(shift, eye), symmetrize_input=False)

    def retry(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        shift, lower = carry
        return factor(jnp.where(failed(lower), 64 * shift, shift))

    eps, tiny = jnp.finfo(g.dtype).eps, jnp.finfo(g.dtype).tiny
    start = factor(jnp.where(trace * eps > tiny, 16 * eps * trace, 1))
    return lax.while_loop(lambda carry: jnp.any(failed(carry[1])), retry, start)[1]


def _turn(basis: Array, psi: Array, t: Array, v: Array) -> Array:
    return v + mm(basis, mm(psi, t))


def _qr_rotation(m: Array, c: Array, v: Array) -> Array:
    """The paper's route (section 3): B from a QR decomposition, ``A V = V + B (exp[S] - I) B^T V``."""
    basis, upper = qr_basis(m)
    psi = expm1(scaled(c, skew_form(upper)), None)
    return _turn(basis, psi, tmm(basis, v), v)


@functools.partial(custom_vjp, nondiff_argnames=("method",))
def _rotate(m: Array, c: Array, v: Array, *, method: str) -> Array:
    """exp(c M J M^T) V. `method` decides how the value is computed; the derivative does not depend on it."""
    if method == "qr":
        return _qr_rotation(m, c, v)
    return _rotate_fwd(m, c, v, method=method)[0]


def _rotate_fwd(m: Array, c: Array, v: Array, *, method: str) -> tuple[Array, Residuals]:
    basis, frame = _frame(m, c)
    t = tmm(basis, v)
    if method == "qr":
        # One factorisation after the other: batched ones side by side can deadlock on CPUs (jaxlib 0.10).
        m_then = lax.optimization_barrier((m, frame))[0]
        y = _rotate(m_then, c, v, method="qr")
    else:
        y = _turn(basis, scaled(c, frame.psi), t, v)
    return y, (m, c, v, frame, t)


def _rotate_jvp(residuals: Residuals, tangents: tuple[Array, Array, Array], *, method: str) -> Array:
    m, c, v, frame, t = residuals
    m_dot, c_dot, v_dot = tangents
    basis = mm(m, frame.inverse)
    basis_dot = mm(m_dot, frame.inverse)
    half = tmm(basis, basis_dot)
    p_dot = half + transpose(half)
    t_dot = tmm(basis_dot, v) + tmm(basis, v_dot)
    psi = scaled(c, frame.psi)
    z_dot = scaled(c_dot, frame.gram) + scaled(c, p_dot)
    psi_dot = scaled(c_dot, frame.psi) + scaled(c, phi(scaled(c, frame.gram), frame.form, z_dot))
    return v_dot + mm(basis_dot, mm(psi, t)) + mm(basis, mm(psi_dot, t) + mm(psi, t_dot))


def _rotate_bwd(residuals: Residuals, y_bar: Array, *, method: str) -> tuple[Array, Array, Array]:
    m, c, v, frame, t = residuals
    basis = mm(m, frame.inverse)
    psi = scaled(c, frame.psi)
    projected = tmm(basis, y_bar)
    t_bar = tmm(psi, projected)
    psi_bar = mm(projected, transpose(t))
    z_bar = phi(scaled(c, frame.gram), -frame.form, scaled(c, psi_bar))
    p_bar = scaled(c, z_bar)
    v_bar = y_bar + mm(basis, t_bar)
    c_bar = jnp.sum(psi_bar * frame.psi, (-2, -1)) + jnp.sum(z_bar * frame.gram, (-2, -1))
    w_t = transpose(frame.inverse)
    m_bar = (
        mm(y_bar, mm(transpose(mm(psi, t)), w_t))
        + mm(v, mm(transpose(t_bar), w_t))
        + mm(basis, mm(p_bar + transpose(p_bar), w_t))
    )
    return m_bar, c_bar, v_bar


_rotate.defvjp(_rotate_fwd, _rotate_bwd)
_rotate.defjvp(_rotate_jvp)


def _rotate_dense(m: Array, c: Array, v: Array) -> Array:
    return mm(expm_skew(scaled(c, skew_form(m))), v)


def _rotate_newton_schulz(
    m: Array, c: Array, v: Array, *, num_iters: int | None, coefficients: Coefficients | None
) -> Array:
    """The paper's second route (section 3): B = M Z by Newton-Schulz, on the Gram matrix.

    For finite `num_iters` B is not quite orthonormal and A an approximation of exp(S); its derivative is that of
    the approximation, through the polynomial.
    """
    z = newton_schulz_polynomial(gram(m), num_iters=num_iters, coefficients=coefficients)
    basis = mm(m, z)
    psi = expm1(scaled(c, skew_form(tmm(basis, m))), None)
    return _turn(basis, psi, tmm(basis, v), v)


def orthogonal_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    alpha: ArrayLike = 1.0,
    mask: Array | None = None,
    method: Method = "exact",
    num_iters: int | None = None,
    coefficients: Coefficients | None = None,
) -> Array:
    r"""Orthogonal self-attention ``exp(S) V``, ``S = alpha / sqrt(D) (Q K^T - K Q^T)``, for every head.

    A = exp(S) is a rotation of the tokens. Time and memory are linear in N for all methods but ``dense``.
    Differentiable in both modes, to any order.

    Args:
      query: ``[..., N, H, D]`` in float64, float32, bfloat16 or float16.
      key: ``[..., N, H, D]``.
      value: ``[..., N, H, E]``; E may differ from D.
      alpha: the scale of the scores, a scalar or one number per head ``[H]``.
      mask: boolean ``[..., N]``, True for valid tokens. Valid tokens get what they would get alone; the others get
        0 and no gradient, whatever they hold.
      method: how the exponential is applied.

        * ``exact``: without a basis, for any N and any rank of [Q, K]. The default.
        * ``dense``: the N x N exponential; cheaper when N is small against 2D.
        * ``auto``: ``dense`` when N <= 2D, else ``exact``.
        * ``qr``: the paper's first route, an orthonormal basis of [Q, K] by QR. The same values and derivatives
          as ``exact``, slower.
        * ``newton_schulz``: the paper's second route, an approximate basis by `num_iters` Newton-Schulz steps.
      num_iters: steps of ``newton_schulz``, see `osa_jax.newton_schulz_basis`; no other method takes it.
      coefficients: coefficient set of ``newton_schulz``, likewise.

    Returns:
      ``[..., N, H, E]`` in `value`'s dtype; computed in the widest of float32 and the arguments' dtypes.

    Raises:
      ValueError: if a shape, dtype, `method` or option does not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 10, 2, 4))  # 10 tokens, 2 heads of width 4
      >>> y = orthogonal_attention(q, k, v, alpha=0.1)
      >>> y.shape, bool(jnp.allclose(jnp.linalg.norm(y), jnp.linalg.norm(v), rtol=1e-5))
      ((10, 2, 4), True)

    Reference: Zhang & Martens 2026, section 2 and Theorem 2.1; ``qr`` and ``newton_schulz``: section 3.
    """
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    if method != "newton_schulz" and not (num_iters is None and coefficients is None):
        raise ValueError(
            f"num_iters and coefficients belong to method='newton_schulz', got method={method!r}, "
            f"num_iters={num_iters!r}, coefficients={coefficients!r}"
        )
    return _attention(query, key, value, alpha, mask, method, num_iters, coefficients)


@functools.partial(jax.jit, static_argnames=("method", "num_iters", "coefficients"))
def _attention(
    query: Array,
    key: Array,
    value: Array,
    alpha: ArrayLike,
    mask: Array | None,
    method: Method,
    num_iters: int | None,
    coefficients: Coefficients | None,
) -> Array:
    m, c = query_key_matrix(query, key, alpha, mask)
    _check_value(query, value)
    dtype = compute_dtype(query, key, value)
    v = jnp.moveaxis(value.astype(dtype), -2, -3)
    valid = True if mask is None else mask[..., None, :, None]
    v = jnp.where(valid, v, 0)
    m, c = m.astype(dtype), c.astype(dtype)
    tokens, width = m.shape[-2:]
    if method == "newton_schulz":
        y = _rotate_newton_schulz(m, c, v, num_iters=num_iters, coefficients=coefficients)
    elif method == "dense" or (method == "auto" and tokens <= width):
        y = _rotate_dense(m, c, v)
    else:
        y = _rotate(m, c, v, method="qr" if method == "qr" else "exact")
    return jnp.moveaxis(jnp.where(valid, y, 0), -3, -2).astype(value.dtype)


def _check_value(query: Array, value: Array) -> None:
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(f"value must be real floating point, got {value.dtype}: cast it first")
    if value.ndim != query.ndim or value.shape[:-1] != query.shape[:-1]:
        raise ValueError(
            f"value must be [..., N, H, E] with query's leading axes {query.shape[:-1]}, got shape {value.shape}"
        )


@jax.jit
def orthogonal_attention_weights(query: Array, key: Array, *, alpha: ArrayLike = 1.0) -> Array:
    r"""The attention matrices ``A = exp(S)`` themselves, to look at: N x N numbers a head.

    Args:
      query: ``[..., N, H, D]``, any floating dtype.
      key: ``[..., N, H, D]``.
      alpha: scalar or ``[H]``.

    Returns:
      A ``[..., H, N, N]``, in float32 at least.

    Raises:
      ValueError: if a shape or dtype does not fit.

    Example:
      >>> import jax
      >>> q, k = jax.random.normal(jax.random.key(0), (2, 5, 1, 4))
      >>> a = orthogonal_attention_weights(q, k)[0]
      >>> bool(jnp.allclose(a @ a.T, jnp.eye(5), atol=1e-5))
      True

    Reference: Zhang & Martens 2026, section 2.
    """
    m, c = query_key_matrix(query, key, alpha)
    return expm_skew(scaled(c, skew_form(m)))
