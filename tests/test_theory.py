"""The papers' theorems, and the identities that follow from them, on the library's own functions.

Zhang & Martens (2026); `vec` stacks columns, as there.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import oracle
from osa_jax import (
    expm_skew,
    newton_schulz_basis,
    orthogonal_attention,
    orthogonal_attention_weights,
    qr_basis,
    query_key_stiefel,
    skew_form,
    skew_scores,
)
from osa_jax.nn import OrthogonalSelfAttention
from tests.helpers import relative_error, value_tolerance

TOKENS, HEADS, WIDTH, FEATURES = 9, 4, 2, 8
METHODS = ("exact", "qr", "dense", "newton_schulz")
RNG = np.random.default_rng(21)
Q, K = RNG.standard_normal((2, TOKENS, HEADS, WIDTH))
ALPHA = np.array([0.05, 0.2, -0.5, 1.0])
each_method = pytest.mark.parametrize("method", METHODS)


def nu(q, k, alpha):
    """c ||[Q, K]||^2 by head."""
    m = np.concatenate([q, k], -1).swapaxes(0, 1)
    return np.abs(alpha) / np.sqrt(q.shape[-1]) * np.linalg.norm(m, 2, (1, 2)) ** 2


def tolerance(method, nus):
    """Newton-Schulz has converged, but its Gram form rounds by eps / sigma^2."""
    return (1e3 if method == "newton_schulz" else 1) * value_tolerance(np.float64, np.max(nus))


@functools.cache
def compiled(method):
    return jax.jit(functools.partial(orthogonal_attention, method=method))


def matrices(method, q, k, alpha):
    """A `[H, N, N]` as the operator applies it."""
    eye = np.tile(np.eye(len(q))[:, None], (1, q.shape[1], 1))
    return np.asarray(compiled(method)(q, k, eye, alpha=alpha)).swapaxes(0, 1)


@pytest.mark.parametrize("tokens", [TOKENS, 2 * WIDTH, 3])
def test_low_rank_form_of_the_exponential(tokens):
    """Theorem 2.1: exp(S) = I + B (exp[S] - I) B^T, with the library's basis and exponential."""
    q, k = Q[:tokens], K[:tokens]
    m = jnp.concatenate([q, k], -1).swapaxes(0, 1)
    basis, triangular = qr_basis(m)
    small = expm_skew((ALPHA / np.sqrt(WIDTH))[:, None, None] * skew_form(triangular))
    basis, small = np.asarray(basis), np.asarray(small)
    a = np.eye(tokens) + basis @ (small - np.eye(small.shape[-1])) @ basis.swapaxes(1, 2)
    exact, bound = oracle.rotation(q, k, ALPHA), tolerance("qr", nu(q, k, ALPHA))
    assert relative_error(a, exact) <= bound
    assert relative_error(orthogonal_attention_weights(q, k, alpha=ALPHA), exact) <= bound


@each_method
def test_the_operator_is_the_dense_exponential(method):
    """Theorem 2.1, as every method applies it."""
    error = relative_error(matrices(method, Q, K, ALPHA), oracle.rotation(Q, K, ALPHA))
    assert error <= tolerance(method, nu(Q, K, ALPHA))


@each_method
def test_kernel_keeps_its_spectrum(method):
    """Theorem 2.2: Sigma_l = A Sigma_0 A^T, here through four layers."""
    x = RNG.standard_normal((TOKENS, 1, 6))
    start, rotation = x[:, 0] @ x[:, 0].T, np.eye(TOKENS)
    for head in range(HEADS):
        q, k, alpha = Q[:, head, None], K[:, head, None], ALPHA[head, None]
        x = compiled(method)(q, k, x, alpha=alpha)
        rotation = oracle.rotation(q, k, alpha)[0] @ rotation
    kernel = np.asarray(x[:, 0] @ x[:, 0].T)
    bound = HEADS * tolerance(method, nu(Q, K, ALPHA))
    assert relative_error(kernel, rotation @ start @ rotation.T) <= bound
    assert relative_error(np.linalg.eigvalsh(kernel), np.linalg.eigvalsh(start)) <= bound
    assert relative_error(kernel, start) > 0.1


@pytest.mark.parametrize("num_iters", [1, 3, 6])
def test_orthogonality_of_an_unfinished_newton_schulz_basis(num_iters):
    """Theorem 3.1: ||Y^T Y - I|| <= (e^||S|| - 1)^2 max_i |sigma_i^2 (sigma_i^2 - 1)|."""
    options = {"num_iters": num_iters, "coefficients": "cubic"}
    heads = 200
    q, k = RNG.standard_normal((2, TOKENS, heads, WIDTH))
    k += RNG.uniform(0, 10, (heads, 1)) * q
    alpha = RNG.uniform(0.01, 0.3, heads)
    eye = np.tile(np.eye(TOKENS)[:, None], (1, heads, 1))
    y = orthogonal_attention(q, k, eye, alpha=alpha, method="newton_schulz", **options)
    y = np.asarray(y).swapaxes(0, 1)
    m = np.concatenate([q, k], -1).swapaxes(0, 1)
    basis = np.asarray(newton_schulz_basis(m, **options))
    sigma = np.linalg.svd(basis, compute_uv=False)
    assert sigma.max() <= 1 + 1e-12
    scores = np.asarray(skew_scores(q, k, alpha=alpha))
    norm = np.linalg.norm(scores, 2, (1, 2))
    bound = np.expm1(norm) ** 2 * np.abs(sigma**2 * (sigma**2 - 1)).max(1)
    defect = np.linalg.norm(y.swapaxes(1, 2) @ y - np.eye(TOKENS), 2, (1, 2))
    assert (defect <= bound * (1 + 1e-10) + 1e-13).all()
    assert (defect > 0.05 * bound).any() and defect.max() > 1e-3

    small = np.asarray(expm_skew(basis.swapaxes(1, 2) @ scores @ basis)) - np.eye(2 * WIDTH)
    assert relative_error(y, np.eye(TOKENS) + basis @ small @ basis.swapaxes(1, 2)) <= 1e-12


# The layer's Jacobian


@functools.cache
def layer(num_heads):
    """A layer as initialised, as a function of the tokens and of alpha, and its parameters."""
    made = OrthogonalSelfAttention(
        num_heads, FEATURES, qk_features=2 * num_heads, param_dtype=jnp.float64, rngs=nnx.Rngs(2)
    )
    graph, state = nnx.split(made)

    def apply(x, alpha):
        merged = nnx.merge(graph, state)
        merged.alpha = nnx.Param(jnp.full(num_heads, alpha))
        return merged(x)

    kernels = (getattr(made, name).kernel[...] for name in ("query", "key", "value", "out"))
    return apply, [np.asarray(kernel) for kernel in kernels]


X = RNG.standard_normal((6, FEATURES)) / 3
STARTS = np.array([0.0, 1e-3, 1e-2, 0.1, 0.3])


def jacobian(f, x):
    """d vec(f) / d vec(x)."""
    return jax.jacfwd(f)(x).transpose(1, 0, 3, 2).reshape(x.size, x.size)


def project(x, kernel):
    return jnp.einsum("nf,fhd->nhd", x, kernel)


@functools.cache
def jacobians(num_heads):
    """J of the layer and J_1, by A(X) alone, for each alpha."""
    apply, (query, key, value, out) = layer(num_heads)

    def by_attention(x, alpha):
        y = orthogonal_attention(project(x, query), project(x, key), project(X, value), alpha=alpha)
        return jnp.einsum("nhd,hdf->nf", y, out)

    def both(alpha):
        return [jacobian(functools.partial(f, alpha=alpha), X) for f in (apply, by_attention)]

    return [np.asarray(j) for j in jax.jit(jax.vmap(both))(STARTS)]


@pytest.mark.parametrize("num_heads", [1, 2])
def test_jacobian_splits_in_two(num_heads):
    """Theorem 4.1: J = J_1 + J_2 with J_2 = (W^V W^O)^T kron A, summed over the heads."""
    _, (query, key, value, out) = layer(num_heads)
    q, k = project(X, query), project(X, key)
    whole, first = jacobians(num_heads)
    for alpha, j, j_1 in zip(STARTS, whole, first, strict=True):
        a = np.asarray(orthogonal_attention_weights(q, k, alpha=alpha))
        j_2 = sum(np.kron((value[:, h] @ out[h]).T, a[h]) for h in range(num_heads))
        assert relative_error(j, j_1 + j_2) <= 1e-13
    assert relative_error(j, j_2) > 0.01


def test_query_key_initialisation_is_perfectly_conditioned():
    """Theorem 4.2: kappa(W~) = 1 for W~ = W^Q W^K^T - W^K W^Q^T, with 2 D singular values 1."""
    both = query_key_stiefel(num_heads=2)(jax.random.key(0), (FEATURES, 12), jnp.float64)
    query, key = (np.asarray(half).reshape(FEATURES, 2, 3) for half in np.split(both, 2, axis=1))
    for kernels in ((query, key), layer(2)[1][:2]):
        product = np.einsum("fhd,ghd->hfg", *kernels)
        spectrum = np.linalg.svd(product - product.swapaxes(1, 2), compute_uv=False)
        rank = 2 * kernels[0].shape[-1]
        assert np.abs(spectrum[:, :rank] - 1).max() <= 1e-13
        assert np.abs(spectrum[:, rank:]).max() <= 1e-13


def slope(num_heads, width):
    """C: the Frechet derivative of exp has norm 1 at skew S, and every weight has norm 1."""
    return num_heads * 2 / np.sqrt(width) * np.linalg.norm(X, 2) ** 2


@pytest.mark.parametrize("num_heads", [1, 2])
def test_attention_part_of_the_jacobian_is_linear_in_alpha(num_heads):
    """Theorem 4.3: ||J_1|| <= C alpha."""
    norms = np.linalg.norm(jacobians(num_heads)[1], 2, (1, 2))
    assert norms[0] == 0
    rates = norms[1:] / STARTS[1:]
    assert (rates <= slope(num_heads, 2)).all() and rates.min() > 0.05 * slope(num_heads, 2)
    assert abs(rates[1] / rates[0] - 1) <= 2e-2


@pytest.mark.parametrize("num_heads", [1, 2])
def test_condition_of_the_jacobian_tends_to_one(num_heads):
    """Theorem 4.4: kappa(J) <= (1 + C alpha) / (1 - C alpha), which tends to 1 with alpha."""
    spectrum = np.linalg.svd(jacobians(num_heads)[0], compute_uv=False)
    kappa = spectrum[:, 0] / spectrum[:, -1]
    reach = slope(num_heads, 2) * STARTS
    small = reach < 1
    assert small.sum() >= 3
    bound = (1 + reach[small]) / (1 - reach[small])
    assert (kappa[small] <= bound + 1e-13).all() and (kappa >= 1).all()
    assert kappa[0] <= 1 + 1e-13
    excess = kappa[1:] - 1
    assert (np.diff(excess) > 0).all() and excess[-1] > 0.1
    assert abs(excess[1] / excess[0] / 10 - 1) <= 0.1


# What follows for A


@each_method
def test_permutation_equivariance(method):
    """A(PQ, PK) = P A P^T (section 2)."""
    order = RNG.permutation(TOKENS)
    a = matrices(method, Q, K, ALPHA)
    got = matrices(method, Q[order], K[order], ALPHA)
    bound = tolerance(method, nu(Q, K, ALPHA))
    assert relative_error(got, a[:, order][:, :, order]) <= bound
    assert relative_error(got, a) > 0.1


@each_method
def test_identities_of_the_scores(method):
    """S is unchanged by K + t Q and by (Q G, K G^-T), and changes sign when Q and K change places."""
    shift, skewed = 1.7, np.eye(WIDTH) + 0.4 * RNG.standard_normal((WIDTH, WIDTH))
    a = matrices(method, Q, K, ALPHA)
    same = [(Q, K + shift * Q), (Q @ skewed, K @ np.linalg.inv(skewed).T)]
    for q, k in same:
        error = relative_error(matrices(method, q, k, ALPHA), a)
        assert error <= tolerance(method, nu(q, k, ALPHA))
    bound = tolerance(method, nu(Q, K, ALPHA))
    assert relative_error(matrices(method, K, Q, ALPHA), a.swapaxes(1, 2)) <= bound
    assert relative_error(matrices(method, Q, K, -ALPHA), a.swapaxes(1, 2)) <= bound
    assert relative_error(a, a.swapaxes(1, 2)) > 0.1


@each_method
def test_parallel_queries_and_keys_turn_nothing(method):
    """A(Q, t Q) = I."""
    for t in (0.0, 1.0, -2.5):
        a = matrices(method, Q, t * Q, ALPHA)
        eye = np.broadcast_to(np.eye(TOKENS), a.shape)
        assert relative_error(a, eye) <= tolerance(method, nu(Q, t * Q, ALPHA))


@each_method
def test_special_orthogonal(method):
    """A is a rotation: A^T A = I and det A = 1 (section 2)."""
    a = matrices(method, Q, K, ALPHA)
    bound = tolerance(method, nu(Q, K, ALPHA))
    assert relative_error(a.swapaxes(1, 2) @ a, np.broadcast_to(np.eye(TOKENS), a.shape)) <= bound
    assert np.abs(np.linalg.det(a) - 1).max() <= 10 * bound
