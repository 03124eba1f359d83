"""The initialisers against float64 numpy, the Haar measure's moments and Theorem 4.2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osa_jax.initializers import (
    blockwise,
    query_key_stiefel,
    scaled_uniform_orthogonal,
    stiefel,
)

KEY = jax.random.key(3)
DTYPES = ("float32", "float64", "bfloat16", "float16")


def matrices(kernel, in_axes, out_axes):
    """The kernel as float64 matrices [..., n_in, n_out], by numpy alone."""
    kernel = np.asarray(kernel.astype(jnp.float64))
    batch = [axis for axis in range(kernel.ndim) if axis not in (*in_axes, *out_axes)]
    moved = kernel.transpose(*batch, *in_axes, *out_axes)
    sizes = [int(np.prod([kernel.shape[axis] for axis in axes])) for axes in (in_axes, out_axes)]
    return moved.reshape(-1, *sizes)


def assert_semi_orthogonal(stack, dtype, scale=1.0):
    """Every matrix equals scale times its own polar factor to rounding."""
    left, _, right = np.linalg.svd(stack, full_matrices=False)
    bound = 8 * float(jnp.finfo(dtype).eps) * np.sqrt(max(stack.shape[-2:]))
    np.testing.assert_allclose(stack, scale * left @ right, rtol=0, atol=scale * bound)


LAYOUTS = {
    # name: initialiser, shape, input axes, output axes of one kernel
    "tall": (stiefel(), (8, 3), (0,), (1,)),
    "wide": (stiefel(), (3, 8), (0,), (1,)),
    "square": (stiefel(), (5, 5), (0,), (1,)),
    "stacked": (stiefel(), (2, 8, 3), (1,), (2,)),
    "per head": (stiefel(in_axis=-3), (8, 4, 3), (0,), (2,)),
    "per layer and head": (stiefel(in_axis=-3), (2, 8, 4, 3), (1,), (3,)),
    "output per head": (stiefel(), (2, 4, 3, 8), (2,), (3,)),
    "heads as one": (stiefel(in_axis=-3, out_axis=(-2, -1)), (2, 12, 4, 3), (1,), (2, 3)),
    "output heads as one": (stiefel(in_axis=(-3, -2)), (4, 3, 12), (0, 1), (2,)),
    "transposed": (stiefel(in_axis=-1, out_axis=0), (3, 2, 7), (2,), (0,)),
}


@pytest.mark.parametrize(
    "layout, dtype",
    [(layout, "float32") for layout in LAYOUTS] + [("per layer and head", d) for d in DTYPES[1:]],
)
def test_stiefel_is_orthogonal_per_layer_and_head(layout, dtype):
    init, shape, in_axes, out_axes = LAYOUTS[layout]
    kernel = init(KEY, shape, dtype)
    assert kernel.shape == shape and kernel.dtype == jnp.dtype(dtype)
    stack = matrices(kernel, in_axes, out_axes)
    assert_semi_orthogonal(stack, dtype)
    assert len(np.unique(stack.round(2), axis=0)) == len(stack)


@pytest.mark.parametrize("shape, scale", [((4, 16), 2.0), ((16, 4), 1.0), ((3, 5, 20), 2.0)])
def test_scaled_uniform_orthogonal_scales_by_the_shape(shape, scale):
    kernel = scaled_uniform_orthogonal()(KEY, shape, jnp.float32)
    stack = matrices(kernel, (len(shape) - 2,), (len(shape) - 1,))
    assert_semi_orthogonal(stack, jnp.float32, scale)


def test_scaled_uniform_orthogonal_keeps_the_mean_square_exactly_when_widening():
    kernel = np.asarray(scaled_uniform_orthogonal()(KEY, (6, 24), jnp.float64))
    x = np.random.default_rng(0).normal(size=(5, 6))
    np.testing.assert_allclose(((x @ kernel) ** 2).mean(-1), (x**2).mean(-1), rtol=1e-12)


def test_scaled_uniform_orthogonal_reads_the_scale_from_the_named_axes():
    init = scaled_uniform_orthogonal(in_axis=-3, out_axis=(-2, -1))
    kernel = init(KEY, (3, 4, 3), jnp.float64)
    assert_semi_orthogonal(matrices(kernel, (0,), (1, 2)), jnp.float64, 2.0)


def test_blockwise_draws_every_block_on_its_own():
    fused = np.asarray(blockwise(stiefel(), 3 * 2)(KEY, (2, 8, 3 * 2 * 4), jnp.float64))
    blocks = fused.reshape(2, 8, 6, 4).transpose(0, 2, 1, 3).reshape(12, 8, 4)
    assert_semi_orthogonal(blocks, jnp.float64)
    assert len(np.unique(blocks.round(2), axis=0)) == 12

    fused = np.asarray(blockwise(stiefel(), 4, axis=-2)(KEY, (4 * 3, 8), jnp.float64))
    assert_semi_orthogonal(fused.reshape(4, 3, 8), jnp.float64)

    gated = np.asarray(blockwise(scaled_uniform_orthogonal(), 2)(KEY, (5, 40), jnp.float64))
    assert_semi_orthogonal(gated.reshape(5, 2, 20).transpose(1, 0, 2), jnp.float64, 2.0)


QUERY_KEY = {
    # name: initialiser, shape, how numpy takes the kernel apart into (2, batch, d, D)
    "one head": (query_key_stiefel(), (8, 6), lambda w: w.reshape(8, 2, 3)[None].swapaxes(1, 2)),
    "per head": (
        query_key_stiefel(in_axis=-3),
        (8, 4, 6),
        lambda w: w.reshape(8, 4, 2, 3).transpose(1, 2, 0, 3),
    ),
    "fused": (
        query_key_stiefel(num_heads=4),
        (8, 24),
        lambda w: w.reshape(8, 2, 4, 3).transpose(2, 1, 0, 3),
    ),
    "fused, stacked": (
        query_key_stiefel(num_heads=4),
        (2, 8, 24),
        lambda w: w.reshape(2, 8, 2, 4, 3).transpose(0, 3, 2, 1, 4).reshape(8, 2, 8, 3),
    ),
}


@pytest.mark.parametrize(
    "layout, dtype",
    [(layout, "float32") for layout in QUERY_KEY] + [("fused", d) for d in DTYPES[1:]],
)
def test_query_key_draw_gives_condition_one(layout, dtype):
    """Theorem 4.2: W^Q W^K^T - W^K W^Q^T has 2D singular values 1 and d - 2D zeros, per head."""
    init, shape, split = QUERY_KEY[layout]
    kernel = init(KEY, shape, dtype)
    assert kernel.shape == shape and kernel.dtype == jnp.dtype(dtype)
    pairs = split(np.asarray(kernel.astype(jnp.float64)))
    query, key = pairs[:, 0], pairs[:, 1]
    skew = query @ key.swapaxes(-1, -2) - key @ query.swapaxes(-1, -2)
    spectrum = np.linalg.svd(skew, compute_uv=False)
    expected = np.broadcast_to(np.repeat([1.0, 0.0], [6, 2]), spectrum.shape)
    np.testing.assert_allclose(spectrum, expected, rtol=0, atol=40 * float(jnp.finfo(dtype).eps))
    assert len(np.unique(query.round(2), axis=0)) == len(query)


def test_joint_value_output_draw_gives_condition_one_and_the_independent_one_does_not():
    features, heads, width = 12, 4, 3
    keys = jax.random.split(KEY)
    joint = stiefel(in_axis=-3, out_axis=(-2, -1)), stiefel(in_axis=(-3, -2))
    independent = stiefel(in_axis=-3), stiefel()

    def spectrum(pair):
        value = np.asarray(pair[0](keys[0], (features, heads, width), jnp.float64))
        out = np.asarray(pair[1](keys[1], (heads, width, features), jnp.float64))
        return np.linalg.svd(np.einsum("fhd,hdg->fg", value, out), compute_uv=False)

    np.testing.assert_allclose(spectrum(joint), np.ones(features), rtol=0, atol=1e-13)
    independent_spectrum = spectrum(independent)
    assert independent_spectrum[0] > 10 * independent_spectrum[-1]


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda n: stiefel()(KEY, (n, 3, 2), jnp.float64), id="tall"),
        pytest.param(lambda n: stiefel()(KEY, (n, 2, 3), jnp.float64).mT, id="wide"),
        pytest.param(lambda n: query_key_stiefel()(KEY, (n, 3, 2), jnp.float64), id="query-key"),
    ],
)
def test_moments_of_the_haar_measure(draw):
    """First, second and fourth moments of O(n), n = 3, within six standard errors."""
    count, n = 40_000, 3
    u = np.asarray(draw(count))
    moments = {
        "E u_ij": (u, 0.0),
        "E u_ij^2": (u**2, 1 / n),
        "E u_ij^4": (u**4, 3 / (n * (n + 2))),
        "E u_11^2 u_22^2": (
            (u[:, 0, 0] * u[:, 1, 1]) ** 2,
            (n + 1) / ((n - 1) * n * (n + 2)),
        ),
        "E u_11 u_12 u_21 u_22": (
            u[:, 0, 0] * u[:, 0, 1] * u[:, 1, 0] * u[:, 1, 1],
            -1 / ((n - 1) * n * (n + 2)),
        ),
    }
    for name, (samples, expected) in moments.items():
        error = np.abs(samples.mean(0) - expected) * np.sqrt(count) / samples.std(0)
        assert error.max() < 6, (name, error)


def test_works_under_jit_and_allocates_nothing_under_eval_shape():
    init = query_key_stiefel(num_heads=2)
    eager = init(KEY, (8, 12), jnp.bfloat16)
    jitted = jax.jit(init, static_argnums=(1, 2))(KEY, (8, 12), jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(jitted), np.asarray(eager))
    huge = jax.eval_shape(lambda key: stiefel()(key, (1 << 20, 1 << 20), jnp.float32), KEY)
    assert huge.shape == (1 << 20, 1 << 20)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 4, 4), (2, 4, 0)])
@pytest.mark.parametrize("factory", [stiefel, scaled_uniform_orthogonal])
def test_empty_kernels_stay_empty(factory, shape):
    assert factory()(KEY, shape, jnp.float32).shape == shape


def test_strict_promotion_of_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        assert stiefel()(KEY, (4, 2), jnp.bfloat16).dtype == jnp.bfloat16


def test_the_dtype_defaults_to_the_default_float():
    assert stiefel()(KEY, (3, 2)).dtype == jnp.result_type(float)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: stiefel()(KEY, (4,), jnp.float32), "in_axis.*-2.*two axes"),
        (lambda: stiefel(out_axis=5)(KEY, (4, 3), jnp.float32), "out_axis.*5"),
        (lambda: stiefel(in_axis=1)(KEY, (4, 3), jnp.float32), "different axes"),
        (lambda: stiefel()(KEY, (4, 3), jnp.int32), "dtype.*int32"),
        (lambda: stiefel()(KEY, (4, 3), jnp.complex64), "dtype.*complex64"),
        (lambda: query_key_stiefel()(KEY, (7, 8), jnp.float32), "D = 4 and d = 7.*more heads"),
        (lambda: query_key_stiefel(num_heads=2)(KEY, (8, 10), jnp.float32), "multiple.*10"),
        (lambda: query_key_stiefel(num_heads=0), "num_heads.*0"),
        (lambda: blockwise(stiefel(), 0), "num_blocks.*0"),
        (lambda: blockwise(stiefel(), 3)(KEY, (4, 8), jnp.float32), "3 blocks and size 8"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
