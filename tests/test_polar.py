"""The scaled polar factor and the largest singular value against numpy's SVD in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osa_jax.polar import largest_singular_value, scaled_polar
from tests.helpers import relative_error

EPS = float(jnp.finfo(np.float32).eps)


def with_singular_values(rng, rows, values):
    """A matrix `[rows, len(values)]` of these singular values."""
    left, _ = np.linalg.qr(rng.normal(size=(rows, len(values))))
    right, _ = np.linalg.qr(rng.normal(size=(len(values), len(values))))
    return (left * values) @ right.T


def hard_matrices(rows, columns):
    """Matrices of condition up to 1e6 with spectra of several kinds, in float32."""
    rng = np.random.default_rng(rows)
    width, matrices = min(rows, columns), []
    for condition in (1, 1e1, 1e3, 1e5, 1e6):
        small = 1 / condition
        for values in (
            np.geomspace(1, small, width),
            np.linspace(1, small, width),
            np.where(np.arange(width) < width / 2, 1, small),
            np.where(np.arange(width) == 0, 1, small),
            np.where(np.arange(width) == width - 1, small, 1 - 2e-5 * np.sign(np.arange(width))),
        ):
            tall = with_singular_values(rng, max(rows, columns), values)
            matrices.append(tall if rows >= columns else tall.T)
    return np.stack(matrices).astype(np.float32)


def exact(w):
    left, values, right = np.linalg.svd(np.asarray(w, np.float64), full_matrices=False)
    return values[..., :1, None] * (left @ right), values[..., 0] / values[..., -1]


@pytest.mark.parametrize("shape", [(96, 24), (24, 24), (5, 17), (7, 1)], ids=str)
def test_equals_the_svd_up_to_condition_1e6(shape):
    matrices = hard_matrices(*shape)
    got = np.asarray(jax.jit(scaled_polar)(matrices))
    assert got.dtype == np.float32
    for c, (expected, condition) in zip(got, map(exact, matrices), strict=True):
        assert relative_error(c, expected) <= max(1e-5, 20 * EPS * condition)


def test_is_as_exact_in_float64():
    matrices = hard_matrices(20, 8).astype(np.float64)
    for c, w in zip(np.asarray(scaled_polar(matrices)), matrices, strict=True):
        values = np.linalg.svd(w, compute_uv=False)
        spectrum = np.linalg.svd(c, compute_uv=False)
        np.testing.assert_allclose(spectrum, values[0], rtol=1e-5)  # Of sigma_max where values crowd: 4e-6.
        np.testing.assert_allclose(c / spectrum[0], exact(w)[0] / values[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_any_scale_will_do(scale):
    w = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    assert relative_error(scaled_polar(w * np.float32(scale)) / np.float32(scale), exact(w)[0]) < 1e-5


def test_without_full_rank_the_rest_is_right_and_nothing_grows():
    rng = np.random.default_rng(1)
    w = rng.normal(size=(12, 6)).astype(np.float32)
    w[:, 2] = 0
    c = np.asarray(scaled_polar(w))
    expected, _ = exact(np.delete(w, 2, axis=1))
    assert relative_error(np.delete(c, 2, axis=1), expected) < 1e-5
    np.testing.assert_array_equal(c[:, 2], 0)
    np.testing.assert_array_equal(scaled_polar(jnp.zeros((3, 2, 2))), 0)
    low = (rng.normal(size=(12, 3)) @ rng.normal(size=(3, 6))).astype(np.float32)
    spectrum = np.linalg.svd(np.asarray(scaled_polar(low)), compute_uv=False)
    np.testing.assert_allclose(spectrum[:3], np.linalg.svd(low, compute_uv=False)[0], rtol=1e-5)
    assert spectrum[3] <= spectrum[0] * (1 + 1e-5)


@pytest.mark.parametrize(
    "values, bound",
    [([3.0, 3.0, 3.0], 1e-6), ([3.0, 2.9, 1e-4], 1e-6), ([3.0, 3.0 - 1e-5, 3.0 - 1e-5], 4.3e-6)],
    ids=["equal", "apart", "crowded"],
)
def test_largest_singular_value(values, bound):
    w = with_singular_values(np.random.default_rng(2), 5, np.array(values)).astype(np.float32)
    got = float(largest_singular_value(jnp.asarray(w.T @ w))[0, 0])
    assert abs(got / np.linalg.norm(w.astype(np.float64), 2) - 1) < bound


def test_the_largest_singular_value_of_nothing_divides_by_one():
    np.testing.assert_array_equal(largest_singular_value(jnp.zeros((2, 3, 3))), np.ones((2, 1, 1)))
