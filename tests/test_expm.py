"""Small exponentials against eigen-decomposition, Rodrigues' formula and complex steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax.test_util import check_grads

from osa_jax import expm_skew, expm_skew_frechet, phi_skew, phi_skew_frechet, symplectic_form
from osa_jax.expm import _series
from tests.helpers import DTYPES, relative_error

expm = jax.jit(expm_skew)
frechet = jax.jit(expm_skew_frechet)


def skew(seed, shape, dtype=np.float64):
    x = np.random.default_rng(seed).standard_normal(shape)
    return (x - x.swapaxes(-1, -2)).astype(dtype)


def spectral_norm(x):
    return np.linalg.norm(x.astype(np.float64), 2, axis=(-2, -1))


def rotation(x):
    """exp of real skew matrices in float64, from the eigenvalues of the Hermitian iX."""
    w, u = np.linalg.eigh(1j * x.astype(np.float64))
    return ((u * np.exp(-1j * w)[..., None, :]) @ u.conj().swapaxes(-1, -2)).real


@pytest.mark.optimized
@pytest.mark.parametrize("size", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_expm_skew_at_every_norm(size, dtype):
    """Also in one batch: the number of doublings of one matrix must not touch another."""
    norms = np.array([0, 1e-6, 1e-3, 1, 3.9, 10.7, 42.9, 1e2, 1e3, 1e4])
    x = skew(0, (len(norms), size, size))
    scale = np.maximum(spectral_norm(x), 1e-9)
    x = (x * (norms / scale)[:, None, None]).astype(dtype)
    got = np.asarray(expm(x))
    eps = np.finfo(dtype).eps
    for i, norm in enumerate(spectral_norm(x)):
        error = np.linalg.norm(got[i].astype(np.float64) - rotation(x[i]), 2)
        assert error <= 20 * eps * max(norm, 1), (norm, error)
        alone = np.where((np.arange(len(norms)) == i)[:, None, None], x, 0)
        np.testing.assert_array_equal(got[i], expm(alone)[i])
        defect = np.linalg.norm(got[i].T.astype(np.float64) @ got[i] - np.eye(size), 2)
        assert defect <= 4 * size * eps


@pytest.mark.optimized
@pytest.mark.parametrize("theta", [3.9, 7.8, 15.7, 125.6, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_single_plane_rotation(theta, dtype):
    """The inputs on which an exponential can be orthogonal and wrong: one pair of eigenvalues."""
    theta = dtype(theta)
    got = np.asarray(expm_skew(jnp.array([[0, theta], [-theta, 0]], dtype)))
    c, s = np.cos(np.float64(theta)), np.sin(np.float64(theta))
    assert np.abs(got - [[c, s], [-s, c]]).max() <= 4 * np.finfo(dtype).eps * theta


@pytest.mark.optimized
@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1e10, 1e30, 3e38])
def test_finite_at_extreme_scales(scale):
    x = (skew(1, (5, 5)) / 10 * scale).astype(np.float32)
    got = np.asarray(expm_skew(x))
    assert np.linalg.norm(got.T @ got - np.eye(5)) < 1e-5
    if scale < 1e-10:
        np.testing.assert_allclose(got, np.eye(5) + x, atol=1e-15)
    grad = jax.grad(lambda x: expm_skew(x)[0, 1])(x)
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_matrix_that_is_not_finite_stays_alone_and_sets_no_trip_count(bad):
    x = np.stack([skew(2, (4, 4)), np.full((4, 4), bad), 50 * skew(3, (4, 4))])
    clean = np.where(np.isfinite(x), x, 0)
    doublings = np.asarray(_series(x, None)[1])
    np.testing.assert_array_equal(doublings, np.asarray(_series(clean, None)[1]))
    got = np.asarray(expm(x))
    assert not np.isfinite(got[1]).any()
    np.testing.assert_array_equal(got[[0, 2]], np.asarray(expm(clean))[[0, 2]])


@pytest.mark.parametrize("norm", [0.1, 3.0, 40.0])
def test_expm_frechet_is_the_block_of_the_block_exponential(norm):
    x = skew(4, (6, 6))
    x *= norm / spectral_norm(x)
    e = np.random.default_rng(5).standard_normal((6, 6))
    block = scipy.linalg.expm(np.block([[x, e], [np.zeros((6, 6)), x]]))
    assert relative_error(frechet(x, e), block[:6, 6:]) < 1e-12 * (1 + norm)


@pytest.mark.parametrize("norm", [0.0, 0.3, 20.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_expm_cotangent(norm, dtype):
    """Against complex steps through SciPy: Im f(X + ih E) / h."""
    x = skew(6, (4, 4))
    x = (x * norm / spectral_norm(x)).astype(dtype)
    bar = np.random.default_rng(7).standard_normal((4, 4)).astype(dtype)
    got = jax.vjp(expm_skew, x)[1](jnp.asarray(bar))[0]
    exact = np.zeros((4, 4))
    for i, j in np.ndindex(4, 4):
        step = np.zeros((4, 4), complex)
        step[i, j] = 1e-30j
        exact[i, j] = np.sum(bar * scipy.linalg.expm(x.astype(np.float64) + step).imag) / 1e-30
    assert relative_error(got, exact) < 50 * np.finfo(dtype).eps * (1 + norm)


def gram_and_form(rank, size=6, seed=8, dtype=np.float64):
    rng = np.random.default_rng(seed)
    b = rng.standard_normal((9, rank)) @ rng.standard_normal((rank, size)) / size
    x = skew(seed + 1, (size, size))
    return b.astype(dtype), x.astype(dtype)


@pytest.mark.optimized
@pytest.mark.parametrize("rank", [0, 1, 3, 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_phi_at_any_rank(rank, dtype):
    b, x = gram_and_form(rank, dtype=dtype)
    psi = np.asarray(phi_skew(b.T @ b, x), np.float64)
    b, x = b.astype(np.float64), x.astype(np.float64)
    scores = b @ x @ b.T
    got = np.eye(9) + b @ psi @ b.T
    assert relative_error(got, rotation(scores)) < 20 * np.finfo(dtype).eps * (1 + spectral_norm(scores))
    # Psi itself, by the exponential of [[X P, X], [0, 0]]: its corner is phi_1(X P) X.
    block = scipy.linalg.expm(np.block([[x @ b.T @ b, x], [np.zeros((6, 12))]]))
    assert relative_error(psi, block[:6, 6:]) < 1e3 * np.finfo(dtype).eps


@pytest.mark.parametrize("rank", [0, 2, 6])
def test_phi_frechet_and_its_adjoint(rank):
    b, x = gram_and_form(rank)
    p, rng = b.T @ b, np.random.default_rng(9)
    e, f = rng.standard_normal((2, 6, 6))

    def corner(p):
        return scipy.linalg.expm(np.block([[x @ p, x], [np.zeros((6, 12))]]))[:6, 6:]

    exact = corner(p + 1e-30j * e).imag / 1e-30
    got = np.asarray(phi_skew_frechet(p, x, e))
    assert relative_error(got, exact) < 1e-12
    adjoint = np.asarray(phi_skew_frechet(p, -x, f))
    assert np.sum(f * got) == pytest.approx(np.sum(adjoint * e), rel=1e-10)


def test_derivatives_in_both_modes_to_third_order():
    b, x = gram_and_form(2, seed=10)
    p = b.T @ b
    modes = ("fwd", "rev")
    check_grads(jax.jit(lambda p: phi_skew((p + p.T) / 2, x)), (p,), order=2, modes=modes)
    check_grads(jax.jit(lambda x: expm_skew(x - x.T)), (skew(11, (4, 4)) / 3,), order=2, modes=modes)
    f = functools.partial(lambda t: jnp.sum(expm_skew(t * symplectic_form(4, jnp.float64))[0]))
    third = [jax.jacfwd(jax.hessian(f)), jax.grad(jax.grad(jax.grad(f))), jax.jacrev(jax.jacfwd(jax.jacfwd(f)))]
    for derivative in third:  # f = cos t + sin t
        assert float(jax.jit(derivative)(0.3)) == pytest.approx(np.sin(0.3) - np.cos(0.3), rel=1e-12)


def test_low_precision_is_computed_in_float32():
    x = jnp.asarray(skew(12, (6, 6)), jnp.bfloat16)
    got = expm_skew(x)
    assert got.dtype == jnp.bfloat16
    exact = rotation(np.asarray(x, np.float64))
    assert np.abs(np.asarray(got, np.float64) - exact).max() <= 2**-8
    assert jax.grad(lambda x: expm_skew(x)[0, 0])(x).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expm_skew(jnp.zeros((3, 4))), r"x must be a \(batch of\) square.*\(3, 4\)"),
        (lambda: expm_skew(jnp.zeros(3)), r"x must be.*\(3,\)"),
        (lambda: expm_skew(jnp.zeros((2, 2), int)), "x must be real floating point, got int"),
        (lambda: expm_skew_frechet(jnp.eye(2), jnp.eye(3)), r"direction must have the shape of x"),
        (lambda: phi_skew(jnp.eye(2), jnp.eye(3)), "form must have the shape of gram"),
        (lambda: phi_skew_frechet(jnp.eye(2), jnp.eye(2), jnp.eye(3)), "direction must have"),
        (lambda: symplectic_form(3), "size must be even"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
