"""Singular values, condition numbers and Jacobians, dense and matrix-free, against NumPy and known spectra."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osa_jax import (
    attention_jacobian,
    condition_number,
    jacobian_spectrum,
    orthogonal_attention,
    singular_values,
)
from tests.helpers import relative_error

RNG = np.random.default_rng(5)


def rotation(size):
    return np.linalg.qr(RNG.standard_normal((size, size)))[0]


def matrix(rows, columns, values):
    """A matrix with these singular values, and zeros."""
    return rotation(rows)[:, : len(values)] * values @ rotation(columns)[:, : len(values)].T


# Singular values and condition numbers


@pytest.mark.parametrize("dtype", [np.float32, np.float64, jnp.bfloat16])
def test_singular_values_of_a_batch(dtype):
    values = np.array([[3.0, 1.0, 0.25], [5.0, 5.0, 0.0]])
    batch = jnp.asarray(np.stack([matrix(4, 3, v) for v in values]), dtype)
    got = singular_values(batch)
    assert got.dtype == (np.float64 if dtype == np.float64 else np.float32)
    exact = np.linalg.svd(np.asarray(batch, np.float64), compute_uv=False)
    assert np.abs(got - exact).max() <= 20 * jnp.finfo(got.dtype).eps
    assert np.abs(exact - values).max() <= (0.1 if dtype == jnp.bfloat16 else 1e-5)


SPECTRA = {
    "regular": ([4.0, 2.0, 1.0], 4.0, 4.0),
    "repeated": ([3.0, 3.0, 3.0], 1.0, 1.0),
    "deficient": ([4.0, 2.0, 0.0], np.inf, 2.0),
    "below the tolerance": ([1.0, 0.5, 1e-16], np.inf, 2.0),
    "above the tolerance": ([1.0, 0.5, 1e-12], 1e12, 1e12),
    "zero": ([0.0, 0.0, 0.0], np.inf, np.inf),
}


def test_condition_numbers_of_a_batch():
    """Each matrix of a batch has its own, plain and effective."""
    values, plain, effective = (np.array(x) for x in zip(*SPECTRA.values(), strict=True))
    batch = np.stack([matrix(5, 3, v) for v in values])
    for transposed in (batch, batch.swapaxes(1, 2)):
        assert np.allclose(condition_number(transposed), plain, rtol=1e-3)
        assert np.allclose(condition_number(transposed, effective=True), effective, rtol=1e-3)
    assert np.isnan(condition_number(np.full((2, 2), np.nan)))
    assert np.isnan(condition_number(np.full((2, 2), np.nan), effective=True))


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
def test_derivative_of_the_condition_number(transform):
    """dkappa = (u_1^T dM v_1 - kappa u_r^T dM v_r) / sigma_r; 0 where kappa is infinite; finite at repeated values."""
    m, direction = matrix(4, 3, [4.0, 2.0, 0.0]), RNG.standard_normal((4, 3))
    u, s, vt = np.linalg.svd(m)
    slopes = [u[:, i] @ direction @ vt[i] for i in range(3)]
    got = transform(lambda t: condition_number(m + t * direction, effective=True))(0.0)
    assert abs(got - (slopes[0] - 2 * slopes[1]) / 2) <= 1e-13
    assert transform(lambda t: condition_number(m + t * direction))(0.0) == 0
    assert transform(lambda t: condition_number(t * direction, effective=True))(0.0) == 0
    assert np.isfinite(transform(lambda t: condition_number(np.eye(3) + t * direction[:3]))(0.0))


# Real attention, of one head


TOKENS, FEATURES, WIDTH = 8, 6, 3
WEIGHTS = {name: RNG.standard_normal((FEATURES, WIDTH)) / 2 for name in ("query", "key", "value")}
INPUTS = RNG.standard_normal((2, TOKENS, FEATURES))


def project(weights, x):
    return [x @ weights[name] for name in ("query", "key", "value")]


def softmax(weights, x):
    q, k, v = project(weights, x)
    return jax.nn.softmax(q @ k.swapaxes(-1, -2) / WIDTH**0.5, -1) @ v


def osa(weights, x):
    q, k, v = (jnp.asarray(y)[..., None, :] for y in project(weights, x))
    return orthogonal_attention(q, k, v, alpha=0.3)[..., 0, :]


LAYERS = {
    f"{layer.__name__}, {name}": (function, at)
    for layer in (softmax, osa)
    for name, function, at in (
        ("input", functools.partial(layer, WEIGHTS), INPUTS[0]),
        ("weights", lambda weights, layer=layer: layer(weights, INPUTS[0]), WEIGHTS),
    )
}
each_layer = pytest.mark.parametrize("name", LAYERS)


@functools.cache
def dense(name):
    function, at = LAYERS[name]
    return np.asarray(jax.jit(functools.partial(attention_jacobian, function))(at))


def columns(name):
    """J column by column, by central differences along each number of x."""
    function, at = LAYERS[name]
    leaves, tree = jax.tree.flatten(at)
    sizes = np.cumsum([leaf.size for leaf in leaves])[:-1]
    shapes = [leaf.shape for leaf in leaves]

    def flat(vector):
        parts = jnp.split(vector, sizes)
        return function(tree.unflatten([p.reshape(s) for p, s in zip(parts, shapes, strict=True)])).ravel()

    start, step = np.concatenate([leaf.ravel() for leaf in leaves]), 1e-5
    moved = start + step * np.concatenate([np.eye(start.size), -np.eye(start.size)])
    up, down = np.split(np.asarray(jax.jit(jax.vmap(flat))(moved)), 2)
    return (up - down).T / (2 * step)


@each_layer
def test_dense_jacobian(name):
    """Columns in the order of the sorted names, row-major; by finite differences."""
    assert relative_error(dense(name), columns(name)) <= 1e-8


@each_layer
def test_both_modes_agree(name, monkeypatch):
    function, at = LAYERS[name]
    for mode in ("jacfwd", "jacrev"):
        with monkeypatch.context() as patch:
            for other in ("jacfwd", "jacrev"):
                patch.setattr(jax, other, getattr(jax, mode))
            # A new function, as jit remembers the old one.
            got = jax.jit(lambda x: attention_jacobian(function, x))(at)
        assert relative_error(got, dense(name)) <= 1e-12


def test_the_cheaper_mode_is_taken(monkeypatch):
    taken = []
    for name in ("jacfwd", "jacrev"):
        mode = getattr(jax, name)
        monkeypatch.setattr(jax, name, lambda f, name=name, mode=mode: (taken.append(name), mode(f))[1])
    assert attention_jacobian(lambda x: jnp.concatenate([x, x]), jnp.ones(3)).shape == (6, 3)
    assert attention_jacobian(lambda x: x[:2], jnp.ones(3)).shape == (2, 3)
    assert taken == ["jacfwd", "jacrev"]


def test_an_input_batch_has_a_jacobian_for_each_element():
    function = LAYERS["softmax, input"][0]
    got = attention_jacobian(function, INPUTS[:, None], batch_dims=2)[:, 0]
    assert relative_error(got[0], dense("softmax, input")) <= 1e-12
    assert relative_error(got[1], got[0]) > 0.1
    spectrum = jax.jit(functools.partial(jacobian_spectrum, function, batch_dims=1))(INPUTS)
    assert np.allclose(spectrum.condition_number, condition_number(got, effective=True), rtol=1e-6)


def test_shared_weights_have_a_jacobian_for_each_input():
    """By vmap over the inputs."""
    got = jax.jit(jax.vmap(lambda x: attention_jacobian(lambda w: softmax(w, x), WEIGHTS)))(INPUTS)
    assert relative_error(got[0], dense("softmax, weights")) <= 1e-12
    spectrum = jax.jit(jax.vmap(lambda x: jacobian_spectrum(lambda w: softmax(w, x), WEIGHTS)))(INPUTS)
    assert np.allclose(spectrum.condition_number, condition_number(got, effective=True), rtol=1e-6)


# Without forming J


@functools.cache
def spectrum_of_a_matrix(num_steps):
    def spectrum(m):
        return jacobian_spectrum(lambda x: m @ x, jnp.zeros(m.shape[1], m.dtype), num_steps=num_steps)

    return jax.jit(spectrum)


KNOWN = {
    "tall": (60, 40, np.geomspace(1, 1e-3, 40)),
    "wide": (40, 60, np.geomspace(7, 1e-3, 40)),
    "deficient": (60, 40, np.linspace(1, 2, 30)),
    "deficient, close together": (60, 60, np.linspace(0.95, 1.05, 40)),
    "deficient, ill-conditioned": (40, 60, np.geomspace(1, 1e-3, 20)),
    "repeated": (60, 40, np.repeat([3.0, 2.0, 0.5], 8)),
    "orthogonal": (60, 60, np.ones(60)),
    "rank one": (40, 60, np.array([3.0])),
    "tiny": (60, 60, np.geomspace(1e-24, 1e-26, 60)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", KNOWN)
def test_known_spectra(name, dtype):
    """With as many steps as there can be; zeros are never taken for a singular value."""
    rows, columns, values = KNOWN[name]
    m = jnp.asarray(matrix(rows, columns, values), dtype)
    got = spectrum_of_a_matrix(200)(m)
    scale = values.max()
    assert abs(got.sigma_max / scale - 1) <= 3e-3
    assert abs(got.condition_number / (scale / values.min()) - 1) <= 1e-2
    assert got.num_matvecs <= 4 * min(m.shape) + 2
    for sigma, error in ((got.sigma_max, got.error_max), (got.sigma_min, got.error_min)):
        assert np.abs(values - sigma).min() <= error + 5e-3 * sigma


@pytest.mark.parametrize("num_steps", [1, 4, 10, 20])
def test_errors_of_few_steps(num_steps):
    """Inside the spectrum, and a singular value within the error."""
    values = np.geomspace(1, 1e-2, 50)
    got = spectrum_of_a_matrix(num_steps)(matrix(80, 70, values))
    assert values.min() * (1 - 1e-12) <= got.sigma_min <= got.sigma_max <= values.max() * (1 + 1e-12)
    for sigma, error in ((got.sigma_max, got.error_max), (got.sigma_min, got.error_min)):
        assert np.abs(values - sigma).min() <= error + 1e-14
    assert got.error_min > 1e-4 and got.num_matvecs == 2 * num_steps + 2
    if num_steps == 20:
        assert got.error_max < 1e-3 and abs(got.sigma_max - 1) < 1e-6


def test_a_jacobian_of_zeros():
    got = spectrum_of_a_matrix(20)(jnp.zeros((80, 70)))
    assert got.sigma_max == got.sigma_min == got.error_min == 0 and got.condition_number == np.inf
    assert np.isnan(spectrum_of_a_matrix(20)(jnp.full((80, 70), jnp.nan)).condition_number)


@pytest.mark.parametrize(("name", "dtype"), [*((name, np.float64) for name in LAYERS), ("softmax, input", np.float32)])
def test_dense_and_matrix_free_agree(name, dtype):
    """kappa(J) within 1 % on real layers; J is rank-deficient for OSA by its weights."""
    function, at = LAYERS[name]
    at = jax.tree.map(lambda x: jnp.asarray(x, dtype), at)
    kappa = condition_number(dense(name), effective=True)
    got = jax.jit(functools.partial(jacobian_spectrum, function))(at)
    assert abs(got.condition_number / kappa - 1) <= 1e-2
    assert np.isinf(condition_number(dense(name))) == (name == "osa, weights")


def test_the_start_vector_is_the_users():
    function, at = LAYERS["softmax, input"]
    spectrum = jax.jit(lambda key: jacobian_spectrum(function, at, num_steps=5, key=key).sigma_min)
    first, other = spectrum(jax.random.key(0)), spectrum(jax.random.key(1))
    default = jax.jit(lambda x: jacobian_spectrum(function, x, num_steps=5).sigma_min)(at)
    assert abs(first / default - 1) <= 1e-12
    assert abs(first / other - 1) > 1e-6


# Bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: singular_values(jnp.ones(3)), r"matrix must be \[..., m, n\].*\(3,\)"),
        (lambda: singular_values(jnp.ones((0, 3))), r"matrix must be .* at least 1, got shape \(0, 3\)"),
        (lambda: condition_number(jnp.ones((2, 2), int)), "matrix must be real floating point, got int"),
        (lambda: attention_jacobian(lambda x: x["a"], {"a": 1.0, "b": 2}), r"x\['b'\] must be real floating.*int"),
        (lambda: attention_jacobian(lambda x: x > 0, jnp.ones(2)), r"fn\(x\) must be real floating point, got bool"),
        (lambda: attention_jacobian(lambda x: 1.0, {}), "x must hold at least one number"),
        (lambda: attention_jacobian(jnp.sum, [jnp.ones(2), jnp.ones(3)], batch_dims=1), "same in every array"),
        (lambda: attention_jacobian(jnp.sum, jnp.ones(2), batch_dims=2), "x must have 2 leading batch axes"),
        (lambda: attention_jacobian(jnp.sum, jnp.ones(2), batch_dims=-1), "x must have -1 leading batch axes"),
        (lambda: jacobian_spectrum(jnp.sum, jnp.ones(2), num_steps=0), "num_steps must be at least 1, got 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
