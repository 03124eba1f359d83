"""The variants of softmax attention: their formulas in numpy, their start, what they train."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.special
from flax import nnx

from osa_jax.models.attention import (
    CombinedAttention,
    ExponentialAttention,
    exponential_decay,
    newton_schulz_attention,
    softmax_attention,
)

F, H, N, DEPTH = 12, 3, 7, 4
X = np.random.default_rng(3).normal(size=(2, N, F))
# Flax takes its softmax in float32 whatever the dtype; errors of 1.5e-7 were seen.
SOFTMAX_ERROR = 2e-6
VARIANTS = ("softmax", "value_skipinit", "shaped", "e_spa", "ns_attention")
# The coefficients that a variant trains, a number a head, beside the kernels and biases of all.
COEFFICIENTS = {"value_skipinit": {"identity", "softmax"}, "shaped": {"identity", "softmax", "uniform"}}


def build(variant, init="orthogonal", num_heads=H, width=F, dtype=None, param_dtype=jnp.float64):
    options = {"init": init, "head_init": "joint", "dtype": dtype, "param_dtype": param_dtype}
    return softmax_attention(variant, num_heads, width, layer=2, depth=DEPTH, rngs=nnx.Rngs(0), **options)


def randomise(layer):
    rng = np.random.default_rng(0)
    state = nnx.state(layer, nnx.Param)
    nnx.update(layer, jax.tree.map(lambda p: p + jnp.asarray(0.3 * rng.normal(size=p.shape)), state))


def to_numpy(layer):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer, nnx.Param)))


def decay_oracle(num_tokens, layer, depth):
    """A_l by scipy's square root; gamma as the paper writes it."""
    distance = np.abs(np.subtract.outer(np.arange(num_tokens), np.arange(num_tokens)))

    def root(index):
        if index == 0:
            return np.eye(num_tokens)
        a = np.sqrt(1 - np.exp(-2 * 0.005))
        gamma = -0.5 * np.log(1 - a ** (2 * index / depth))
        return scipy.linalg.sqrtm(np.exp(-gamma * distance)).real

    return root(layer) @ np.linalg.inv(root(layer - 1))


def head_oracle(variant, head, coefficients, q, k, v):
    """One head's output, for tokens [N, D]."""
    scores = q @ k.T / np.sqrt(q.shape[1])
    matrix = scipy.special.softmax(scores, axis=1)
    if variant == "value_skipinit":
        matrix = coefficients["identity"][head] * np.eye(N) + coefficients["softmax"][head] * matrix
    elif variant == "shaped":
        uniform = np.full((N, N), coefficients["uniform"][head] / N)
        matrix = coefficients["identity"][head] * np.eye(N) + coefficients["softmax"][head] * matrix - uniform
    elif variant == "e_spa":
        decay = decay_oracle(N, 2, DEPTH)
        diagonal = np.diag(decay.sum(1))
        matrix = diagonal @ scipy.special.softmax(scores + np.log(np.linalg.inv(diagonal) @ decay), axis=1)
    out = matrix @ v
    if variant == "ns_attention":
        left, singular, right = np.linalg.svd(out, full_matrices=False)
        size = np.sqrt((singular**2).sum())
        out = left * size * (1.5 * singular / size - 0.5 * (singular / size) ** 3) @ right
    return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_its_formula(variant):
    layer = build(variant)
    randomise(layer)
    p = to_numpy(layer)
    expected = []
    for x in X:
        q, k, v = (
            np.einsum("nf,fhd->hnd", x, p[name]["kernel"]) + p[name]["bias"][:, None]
            for name in ("query", "key", "value")
        )
        heads = [head_oracle(variant, head, p.get("attention_fn"), q[head], k[head], v[head]) for head in range(H)]
        expected.append(np.einsum("hnd,hdf->nf", heads, p["out"]["kernel"]) + p["out"]["bias"])
    np.testing.assert_allclose(layer(jnp.asarray(X)), expected, rtol=SOFTMAX_ERROR, atol=SOFTMAX_ERROR)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_trained_parameters(variant):
    p = to_numpy(build(variant))
    kernels = {name: p.pop(name) for name in ("query", "key", "value", "out")}
    assert {name: kernel["kernel"].shape for name, kernel in kernels.items()} == {
        "query": (F, H, F // H),
        "key": (F, H, F // H),
        "value": (F, H, F // H),
        "out": (H, F // H, F),
    }
    coefficients = p.pop("attention_fn", {})
    assert set(coefficients) == COEFFICIENTS.get(variant, set()) and not p
    assert all(value.shape == (H,) for value in coefficients.values())


@pytest.mark.parametrize("variant", ["value_skipinit", "shaped", "e_spa"])
def test_the_map_at_the_start(variant):
    layer = build(variant)
    p = to_numpy(layer)
    values = np.einsum("fhd,hdg->fg", p["value"]["kernel"], p["out"]["kernel"])
    np.testing.assert_allclose(values @ values.T, np.eye(F), atol=1e-12)
    assert (variant == "value_skipinit") == p["query"]["kernel"].any()
    matrix = decay_oracle(N, 2, DEPTH) if variant == "e_spa" else np.eye(N)
    np.testing.assert_allclose(layer(jnp.asarray(X)), matrix @ X @ values, rtol=0, atol=SOFTMAX_ERROR)


@pytest.mark.parametrize("variant", ["value_skipinit", "shaped", "e_spa"])
def test_what_moves_first(variant):
    layer = build(variant)
    grads = to_numpy(nnx.grad(lambda m: (m(jnp.asarray(X)) ** 3).sum())(layer))
    # With b = 0 or W^Q = 0 one of the two factors of the scores has to move before the other can.
    moving = set() if variant == "value_skipinit" else {"query"}
    assert {name for name in ("query", "key") if np.abs(grads[name]["kernel"]).max() > 1e-9} == moving
    for name, grad in grads.get("attention_fn", {}).items():
        assert np.abs(grad).min() > 1e-6, name


def test_e_spa_s_matrices_multiply_to_the_correlations_of_every_layer():
    product = np.eye(N)
    neighbours = []
    for layer in range(1, DEPTH + 1):
        product = exponential_decay(N, layer, DEPTH) @ product
        kernel = product @ product.T
        neighbours.append(kernel[0, 1])
        distance = np.abs(np.subtract.outer(np.arange(N), np.arange(N)))
        np.testing.assert_allclose(kernel, kernel[0, 1] ** distance, rtol=1e-10)
    assert sorted(neighbours) == neighbours and abs(neighbours[-1] - np.exp(-0.005)) < 1e-12


@pytest.mark.parametrize("num_tokens, depth", [(1, 1), (16, 24), (50, 6), (197, 12)])
def test_e_spa_s_logarithms_exist(num_tokens, depth):
    for layer in {1, depth // 2 + 1, depth}:
        decay = exponential_decay(num_tokens, layer, depth)
        assert decay.min() > 0
        expected = decay_oracle(num_tokens, layer, depth)
        np.testing.assert_allclose(decay, expected, rtol=0, atol=1e-9)


def test_newton_schulz_keeps_rank_one_and_zero():
    heads = jnp.asarray(np.random.default_rng(0).normal(size=(2, N, H, 4)))
    zero = jnp.zeros_like(heads)
    # Equal scores: every token gets the mean value, so H has rank one and one step leaves it alone.
    mean = np.broadcast_to(np.mean(heads, axis=1, keepdims=True), heads.shape)
    np.testing.assert_allclose(newton_schulz_attention(zero, zero, heads), mean, rtol=SOFTMAX_ERROR)
    assert not newton_schulz_attention(heads, heads, zero).any()
    grad = jax.grad(lambda v: (newton_schulz_attention(heads, heads, v) ** 2).sum())(zero)
    assert not grad.any()


def test_cutting_the_skip_with_one_head():
    width = 64
    layer = build("softmax", init="cutting_the_skip", num_heads=1, width=width)
    p = to_numpy(layer)
    query, key, value = (p[name]["kernel"][:, 0] for name in ("query", "key", "value"))
    out = p["out"]["kernel"][0]
    np.testing.assert_allclose(value.T @ value, 9 * np.eye(width), atol=1e-11)
    np.testing.assert_allclose(out @ out.T, 9 * np.eye(width), atol=1e-11)
    assert np.abs(value @ out / 9 - np.eye(width)).max() > 0.5
    # With D = F nothing is cut off, so the noise can be had back.
    noise = (query @ key.T - 0.6 * np.eye(width)) / 2 * np.sqrt(width)
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.03
    assert abs(np.diag(noise).mean()) < 0.4
    np.testing.assert_allclose(query.T @ query, key.T @ key, atol=1e-10)


def test_cutting_the_skip_keeps_the_largest_part_in_each_head():
    width, heads = 64, 4
    layer = build("softmax", init="cutting_the_skip", num_heads=heads, width=width, param_dtype=jnp.float32)
    p = to_numpy(layer)
    products = np.einsum("fhd,ghd->hfg", p["query"]["kernel"], p["key"]["kernel"])
    singular = np.linalg.svd(products, compute_uv=False)
    assert np.abs(singular[:, 16:]).max() < 1e-5
    rng = np.random.default_rng(0)
    samples = 2 * rng.normal(size=(50, width, width)) / np.sqrt(width) + 0.6 * np.eye(width)
    expected = np.linalg.svd(samples, compute_uv=False)[:, :16].mean(0)
    np.testing.assert_allclose(singular[:, :16].mean(0), expected, rtol=0.05)
    assert np.abs(products[0] - products[1]).max() > 0.1
    whole = p["value"]["kernel"].reshape(width, width) @ p["out"]["kernel"].reshape(width, width)
    np.testing.assert_allclose(whole @ whole.T, 81 * np.eye(width), atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_batch_axes_and_bfloat16(variant):
    layer = build(variant)
    randomise(layer)
    expected = layer(jnp.asarray(X))
    np.testing.assert_allclose(layer(jnp.asarray(X[0])), expected[0], rtol=SOFTMAX_ERROR, atol=SOFTMAX_ERROR)
    np.testing.assert_allclose(layer(jnp.asarray(X[None])), expected[None], rtol=SOFTMAX_ERROR, atol=SOFTMAX_ERROR)
    low = build(variant, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    out = low(jnp.asarray(X, jnp.float32))
    assert out.dtype == jnp.bfloat16
    high = build(variant, dtype=jnp.float32, param_dtype=jnp.float32)(jnp.asarray(X, jnp.float32))
    assert np.abs(np.asarray(out, np.float32) - high).max() < 0.1 * np.abs(high).max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_layers_are_compiled_once(variant):
    first, second = (nnx.graphdef(build(variant)) for _ in range(2))
    assert first == second and hash(first) == hash(second)


def test_masks_are_refused_where_the_formula_has_none():
    q = jnp.ones((1, N, H, 4))
    mask = jnp.ones((1, H, N, N), bool)
    combined = CombinedAttention(H, identity=1.0, softmax=1.0, uniform=1.0)
    for attend in (combined, ExponentialAttention(layer=1, depth=2)):
        with pytest.raises(ValueError, match="mask and is_causal must be left out"):
            attend(q, q, q, mask=mask)
        with pytest.raises(ValueError, match="mask and is_causal must be left out"):
            attend(q, q, q, is_causal=True)
