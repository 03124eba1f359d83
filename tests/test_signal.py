"""Measures of rank collapse against numpy and closed forms, Theorem 2.2, and the stages of a real transformer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from osa_jax import orthogonal_attention
from osa_jax.models import ViT
from osa_jax.models.signal import effective_rank, kernel_spectrum, mean_cosine, measure_signal

TOLERANCE = {np.float32: 2e-6, np.float64: 1e-13}


def random_tokens(shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def shares_of(matrix):
    """Eigenvalues of X X^T over their sum, in float64, the largest first."""
    values = np.linalg.eigvalsh(matrix.astype(np.float64) @ matrix.T.astype(np.float64))[::-1]
    return np.maximum(values, 0) / values.sum()


def rank_of(matrix):
    p = np.sqrt(shares_of(matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T))
    p /= p.sum()
    return np.exp(-(p * np.log(p)).sum())


def cosine_of(tokens):
    pairs = [(x, y) for i, x in enumerate(tokens) for j, y in enumerate(tokens) if i != j]
    return np.mean([x @ y / (np.linalg.norm(x) * np.linalg.norm(y)) for x, y in pairs])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5)])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_measures_equal_numpy_at_any_scale_with_batch_axes(dtype, shape, scale):
    tokens = random_tokens((2, 3, *shape), dtype)
    got = [measure(jnp.asarray(tokens) * dtype(scale)) for measure in (kernel_spectrum, effective_rank, mean_cosine)]
    assert [value.shape for value in got] == [(2, 3, shape[0]), (2, 3), (2, 3)]
    for value, oracle in zip(got, (shares_of, rank_of, cosine_of), strict=True):
        expected = [[oracle(matrix) for matrix in row] for row in tokens]
        np.testing.assert_allclose(value, expected, rtol=10 * TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert value.dtype == dtype


def test_measures_of_equal_directions_and_of_one_direction():
    left, _ = np.linalg.qr(random_tokens((7, 7)))
    right, _ = np.linalg.qr(random_tokens((7, 7), seed=1))
    equal = jnp.asarray(left[:, :4] @ right[:4])
    np.testing.assert_allclose(effective_rank(equal), 4, rtol=1e-12)
    np.testing.assert_allclose(kernel_spectrum(equal), [0.25] * 4 + [0] * 3, atol=1e-12)
    one = jnp.asarray(np.outer(np.arange(1.0, 5.0), np.arange(1.0, 4.0)))
    np.testing.assert_allclose(effective_rank(one), 1, rtol=1e-12)
    np.testing.assert_allclose(mean_cosine(one), 1, rtol=1e-12)
    np.testing.assert_allclose(kernel_spectrum(one), [1, 0, 0, 0], atol=1e-12)


def test_zeros_and_single_tokens():
    tokens = jnp.array([[3.0, 0.0], [0.0, 0.0], [5.0, 0.0]])
    np.testing.assert_allclose(mean_cosine(tokens), 1 / 3, rtol=1e-12)
    assert all(np.isnan(measure(jnp.zeros((2, 2)))).all() for measure in (kernel_spectrum, effective_rank, mean_cosine))
    with pytest.raises(ValueError, match=r"at least two, got shape \(1, 2\)"):
        mean_cosine(tokens[:1])


def test_bfloat16_is_measured_in_float32():
    tokens = jnp.asarray(random_tokens((4, 3)), jnp.bfloat16)
    for measure in (kernel_spectrum, effective_rank, mean_cosine):
        assert measure(tokens).dtype == np.float32
        np.testing.assert_array_equal(measure(tokens), measure(tokens.astype(jnp.float32)))


def test_theorem_2_2_orthogonal_attention_keeps_the_kernel_s_spectrum_and_softmax_does_not():
    x, weights = random_tokens((9, 6)), np.linalg.qr(random_tokens((6, 6), seed=1))[0]
    query, key = (jnp.asarray(x @ random_tokens((6, 2), seed=seed))[:, None] for seed in (2, 3))
    before = shares_of(x)
    attended = orthogonal_attention(query, key, jnp.asarray(x)[:, None], alpha=0.7)[:, 0]
    assert np.abs(attended - x).max() > 0.5  # It does mix the tokens.
    np.testing.assert_allclose(kernel_spectrum(attended @ weights), before, atol=1e-12)
    np.testing.assert_allclose(effective_rank(attended @ weights), rank_of(x), rtol=1e-12)
    softmax = jax.nn.softmax(query[:, 0] @ key[:, 0].T)
    assert effective_rank(softmax @ x) < 0.8 * rank_of(x)


@pytest.mark.parametrize("skip", [False, True])
def test_the_stages_of_a_transformer(skip):
    model = ViT(
        image_shape=(8, 8, 1),
        num_classes=10,
        patch_size=4,
        width=8,
        depth=2,
        num_heads=1,
        qk_features=4,
        attention="orthogonal",
        skip=skip,
        norm=False,
        init="orthogonal",
        alpha=0.5,
        rngs=nnx.Rngs(0),
    )
    images = random_tokens((3, 8, 8, 1), np.float32)
    _, out = model(images, return_intermediates=True)
    signal = measure_signal(out)
    names = ["tokens", "block_0/attended", "block_0/output", "block_1/attended", "block_1/output"]
    for image in range(3):
        stages = [np.array(out[name][image]) for name in names]
        np.testing.assert_allclose(signal.spectrum[image], [shares_of(x) for x in stages], atol=1e-5)
        ranks = [rank_of(x) for x in stages]
        np.testing.assert_allclose(signal.rank[image], ranks, rtol=1e-5)
        np.testing.assert_allclose(signal.cosine[image], [cosine_of(x) for x in stages], atol=1e-5)
        first = ranks[1] / ranks[0]
        np.testing.assert_allclose(signal.attention_kept[image], [first, first * ranks[3] / ranks[2]], rtol=1e-5)
    # One head, orthogonal weights: without the skip it is the theorem's attention.
    assert (np.abs(signal.attention_kept - 1).max() < 1e-5) == (not skip)
