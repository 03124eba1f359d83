"""The papers' bounds and derivatives (`osa_jax.theory`) against the exact quantities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osa_jax import (
    attention_jacobian,
    condition_number,
    orthogonal_attention,
    orthogonality_bound,
    osa_condition_bound,
    osa_slope,
    softmax_attention_derivatives,
    softmax_condition_bound,
    spectral_conditioning_bound,
)
from tests.helpers import relative_error

RNG = np.random.default_rng(8)


# Orthogonal Self-Attention, each bound on 1,000 random inputs

COUNT = 1000


def normal(*shape, scale=1.0):
    return scale * RNG.standard_normal((COUNT, *shape))


def norm_of(matrices):
    return np.linalg.norm(np.asarray(matrices), 2, (-2, -1))


def log_uniform(low, high):
    return np.exp(RNG.uniform(np.log(low), np.log(high), (COUNT, 1, 1)))


@pytest.mark.parametrize("largest", [1.0, 1.2])
def test_orthogonality_bound(largest):
    """Theorem 3.1, and beyond it for singular values above 1; Y by NumPy's eigenvalues of iS."""
    scores, basis = normal(6, 6, scale=log_uniform(0.01, 1)), normal(6, 4)
    scores -= scores.swapaxes(1, 2)
    basis *= largest * RNG.uniform(0.3, 1, (COUNT, 1, 1)) / norm_of(basis)[:, None, None]
    small = basis.swapaxes(1, 2) @ scores @ basis
    values, vectors = np.linalg.eigh(1j * small)
    turn = ((vectors * np.exp(-1j * values)[:, None]) @ vectors.conj().swapaxes(1, 2)).real
    y = np.eye(6) + basis @ (turn - np.eye(4)) @ basis.swapaxes(1, 2)
    defect = norm_of(y.swapaxes(1, 2) @ y - np.eye(6))
    bound = np.asarray(jax.jit(orthogonality_bound)(scores, basis))
    assert (defect <= bound + 1e-14).all()
    sigma = np.linalg.svd(basis, compute_uv=False)
    assert (defect > 0.05 * bound).mean() > 0.1
    paper = np.expm1(norm_of(scores)) ** 2 * np.abs(sigma**2 * (sigma**2 - 1)).max(1)
    within = sigma.max(1) <= 1
    assert np.allclose(bound[within], paper[within], rtol=1e-9) and (bound >= paper * (1 - 1e-9)).all()
    assert within.all() == (largest == 1)


def osa_head(x, query, key, value, out, alpha):
    q, k, v = ((x @ w)[:, None] for w in (query, key, value))
    return orthogonal_attention(q, k, v, alpha=alpha, method="dense")[:, 0] @ out


@pytest.mark.optimized
def test_bounds_of_osa():
    """Theorems 4.3, with any weights, and 4.4, with orthonormal ones; E < F, so kappa is the effective one."""
    x, alpha = normal(4, 5, scale=log_uniform(0.1, 1)), log_uniform(1e-3, 1)[:, 0, 0]
    weights = normal(5, 2), normal(5, 2), normal(5, 3), normal(3, 5)
    orthonormal = [np.linalg.qr(w)[0] for w in weights[:3]] + [np.linalg.qr(weights[3].swapaxes(1, 2))[0]]
    orthonormal[3] = orthonormal[3].swapaxes(1, 2)

    @jax.jit
    @jax.vmap
    def both(x, alpha, *weights):
        def first(moved):
            q, k = ((moved @ w)[:, None] for w in weights[:2])
            return orthogonal_attention(q, k, (x @ weights[2])[:, None], alpha=alpha, method="dense")[:, 0] @ weights[3]

        whole = attention_jacobian(lambda x: osa_head(x, *weights, alpha), x)
        return whole, attention_jacobian(first, x)

    slope = np.asarray(jax.jit(osa_slope)(x, *weights))
    first = norm_of(both(x, alpha, *weights)[1])
    assert (first <= slope * alpha * (1 + 1e-12)).all()
    assert (first > 0.1 * slope * alpha).mean() > 0.1

    reach = jax.jit(osa_slope)(x, *orthonormal) * alpha
    bound = np.asarray(osa_condition_bound(reach))
    whole = both(x, alpha, *orthonormal)[0]
    kappa = np.asarray(jax.jit(functools.partial(condition_number, effective=True))(whole))
    assert (kappa <= bound * (1 + 1e-12)).all() and (kappa >= 1 - 1e-12).all()
    assert 0.2 < np.isfinite(bound).mean() < 0.95 and (kappa - 1 > 0.05 * (bound - 1)).mean() > 0.1


def test_condition_bound_where_nothing_is_left():
    got = osa_condition_bound(np.array([0.0, 0.5, 0.5, 2.0, np.nan]), delta=np.array([0.0, 0.25, 0.5, 0.0, 0.0]))
    assert np.array_equal(got, [1.0, 7.0, np.inf, np.inf, np.nan], equal_nan=True)


# Softmax attention


def softmax_head(weights, x, scale):
    return jax.nn.softmax(scale * x @ weights[0] @ weights[1].T @ x.T, -1) @ x @ weights[2]


@jax.jit
@jax.vmap
def autodiff(x, query, key, value, scale):
    """The three derivatives by jacfwd, in the paper's order."""
    blocks = jax.jacfwd(softmax_head)((query, key, value), x, scale)
    return [b.transpose(1, 0, 3, 2).reshape(b.shape[0] * b.shape[1], -1) for b in blocks]


def commutation(rows, columns):
    """T with T vec(W) = vec(W^T)."""
    order = np.arange(rows * columns).reshape(columns, rows).T.ravel()
    return np.eye(rows * columns)[order]


def printed(x, query, key, value):
    """Theorem 3.3 as the paper prints it, with Kronecker products."""
    tokens = len(x)
    p = np.exp(x @ query @ key.T @ x.T)
    p /= p.sum(1, keepdims=True)
    spread = np.zeros((tokens, tokens, tokens, tokens))  # [column, row, column, row]
    for i in range(tokens):
        spread[:, i, :, i] = np.diag(p[i]) - np.outer(p[i], p[i])
    left = np.kron((x @ value).T, np.eye(tokens)) @ spread.reshape(tokens**2, -1)
    by_query = left @ np.kron(x @ key, x)
    by_key = left @ np.kron(x, x @ query) @ commutation(*key.shape)
    return by_query, by_key, np.kron(np.eye(value.shape[1]), p @ x)


def heads(tokens, features, width, outputs, scale=0.5):
    weights = (normal(features, n, scale=scale) for n in (width, width, outputs))
    return normal(tokens, features), *weights


def test_closed_form_derivatives_of_softmax_attention():
    """Theorem 3.3 is autodiff, and what the paper prints."""
    inputs = heads(4, 3, 2, 2)
    got = jax.jit(softmax_attention_derivatives)(*inputs)
    for mine, exact in zip(got, autodiff(*inputs, np.ones(COUNT)), strict=True):
        assert relative_error(mine, exact) <= 1e-14 and np.abs(mine - exact).max() <= 1e-10
    for mine, exact in zip(got, printed(*(a[0] for a in inputs)), strict=True):
        assert relative_error(mine[0], exact) <= 1e-14
    w = RNG.standard_normal((3, 2))
    assert np.array_equal(commutation(3, 2) @ w.ravel("F"), w.T.ravel("F"))

    scaled = softmax_attention_derivatives(
        inputs[0][:4, None], *(w[:8].reshape(4, 2, 3, 2) for w in inputs[1:]), scale=0.7
    )
    repeated = np.repeat(inputs[0][:4], 2, 0)
    for mine, exact in zip(scaled, autodiff(repeated, *(w[:8] for w in inputs[1:]), np.full(8, 0.7)), strict=True):
        assert relative_error(mine.reshape(exact.shape), exact) <= 1e-14


def kappas(inputs, scale=1.0):
    """Effective condition number of J by autodiff, the bound that holds, and the paper's."""
    j = np.concatenate(autodiff(*inputs, np.full(COUNT, scale)), -1)
    exact = condition_number(j, effective=True)
    bounds = (
        jax.jit(functools.partial(f, scale=scale)) for f in (softmax_condition_bound, spectral_conditioning_bound)
    )
    return [np.asarray(x) for x in (exact, *(bound(*inputs) for bound in bounds))]


@pytest.mark.parametrize("value_scale", [1e-2, 1.0, 1e2])
def test_condition_bound_of_softmax_attention(value_scale):
    """It holds whatever the scale of W_V is, with N <= F tokens; with more there is none."""
    x, query, key, value = heads(4, 6, 3, 3)
    exact, bound, _ = kappas((x, query, key, value * value_scale), scale=0.5)
    assert (exact <= bound * (1 + 1e-9)).all()
    assert np.isfinite(bound).all() and np.median(bound / exact) < (1.1 if value_scale < 1 else 200)
    assert np.isinf(softmax_condition_bound(normal(7, 6), query, key, value)).all()


def test_the_papers_bound_is_not_one():
    """Theorem 3.4 with the effective kappa(Lambda): above kappa(J) at the usual scale, below it at others."""
    usual = heads(4, 6, 3, 3, scale=0.3)
    exact, _, paper = kappas(usual)
    assert (exact <= paper).mean() > 0.99
    x, *weights = (np.linalg.qr(a)[0] for a in (normal(8, 3), *(normal(8, 4) for _ in range(3))))
    x, (query, key, value) = x.swapaxes(1, 2), weights
    exact, bound, paper = kappas((x, query, key, 100 * value))
    assert (exact > 5 * paper).mean() > 0.9
    assert (exact <= bound).all()
    unscaled = jax.jit(spectral_conditioning_bound)(x, query, key, value)
    assert np.allclose(unscaled, paper, rtol=1e-6)


def test_the_papers_bound_against_its_formula():
    inputs = [a[0] for a in heads(4, 6, 3, 2)]
    x, query, key, value = inputs
    p = np.exp(x @ query @ key.T @ x.T)
    p /= p.sum(1, keepdims=True)
    slopes = np.concatenate([np.linalg.eigvalsh(np.diag(row) - np.outer(row, row)) for row in p])
    assert (np.abs(slopes) < 1e-15).sum() == 4  # so kappa(Lambda) as printed is infinite
    of_spread = slopes.max() / slopes[slopes > 1e-15].min()
    of_x, of_query, of_key, of_value, of_p = (np.linalg.cond(a) for a in (*inputs, p))
    expected = of_x**3 * of_spread * of_value * (of_query + of_key) + of_x * of_p
    assert relative_error(spectral_conditioning_bound(*inputs), expected) <= 1e-9
    query[:, 0] = query[:, 1]
    assert np.isinf(spectral_conditioning_bound(*inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones(4)}, r"x must be \[..., N, F\].*\(4,\)"),
        ({"query": jnp.ones((5, 2))}, r"query must be \[..., F, D\] with x's 4 features.*\(5, 2\)"),
        ({"key": jnp.ones((4, 3))}, "query and key must have the same width"),
        ({"value": jnp.ones((4, 2), int)}, "value must be real floating point, got int"),
    ],
)
@pytest.mark.parametrize(
    "function", [osa_slope, softmax_attention_derivatives, softmax_condition_bound, spectral_conditioning_bound]
)
def test_bad_input(function, change, message):
    arguments = {"x": jnp.ones((3, 4)), **{name: jnp.ones((4, 2)) for name in ("query", "key", "value")}} | change
    if function is osa_slope:
        arguments["out"] = jnp.ones((2, 4))
    with pytest.raises(ValueError, match=message):
        function(**arguments)


def test_bad_output_kernel():
    x, w = jnp.ones((3, 4)), jnp.ones((4, 2))
    with pytest.raises(ValueError, match=r"out must be \[..., E, F\] = \[..., 2, 4\].*\(4, 2\)"):
        osa_slope(x, w, w, w, w)
