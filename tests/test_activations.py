"""Activations: their gains, and the Q and C maps of DKS and TAT by Hermite series and quadrature."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special
from numpy.polynomial import hermite_e

from osa_jax.models import activations
from osa_jax.models.activations import ACTIVATIONS, make_activation, preserving_gain, tailored_leaky_relu

NUMPY = {
    "gelu": lambda x: x * scipy.special.ndtr(x),
    "silu": lambda x: x * scipy.special.expit(x),
    "tanh": np.tanh,
}
NODES, WEIGHTS = hermite_e.hermegauss(120)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
SHAPED = [(name, shaping, 6) for name in NUMPY for shaping in ("dks", "tat")] + [
    ("gelu", "dks", 24),
    ("gelu", "tat", 24),
]


def in_numpy(name, activation):
    """The activation from its four numbers."""
    return lambda x: activation.gain * (NUMPY[name](activation.scale * x + activation.shift) + activation.offset)


def hermite_squares(function, count=60):
    """b_k^2 with C(c) = sum_k b_k^2 c^k: the squared coefficients in normalised Hermite polynomials."""
    values = function(NODES) * WEIGHTS
    coefficients = [
        values @ hermite_e.hermeval(NODES, [0] * k + [1]) / math.sqrt(math.factorial(k)) for k in range(count)
    ]
    return np.square(coefficients)


@pytest.mark.parametrize("name, shaping, depth", SHAPED)
def test_the_shaped_activations_meet_their_conditions(name, shaping, depth):
    activation = make_activation(name, shaping=shaping, depth=depth)
    function = in_numpy(name, activation)
    x = np.linspace(-4.0, 4.0, 31)
    np.testing.assert_allclose(activation(jnp.asarray(x)), function(x), rtol=1e-10, atol=1e-12)

    def q_map(q):
        return WEIGHTS @ function(np.sqrt(q) * NODES) ** 2

    squares = hermite_squares(function)
    k = np.arange(len(squares))
    assert abs(q_map(1.0) - 1) < 1e-9 and abs(squares.sum() - 1) < 1e-9
    assert abs((q_map(1 + 1e-4) - q_map(1 - 1e-4)) / 2e-4 - 1) < 1e-6
    if shaping == "dks":
        assert squares[0] < 1e-18
        assert abs(k @ squares - 1.5 ** (1 / depth)) < 1e-9
    else:
        assert abs(k @ squares - 1) < 1e-9
        assert abs((k * (k - 1)) @ squares - 0.3 / depth) < 1e-9


@pytest.mark.parametrize("shaping, slope, curvature", [("dks", 1.5, None), ("tat", 1.0, 0.3)])
def test_the_c_map_of_the_whole_network_meets_the_target(shaping, slope, curvature):
    squares = hermite_squares(in_numpy("gelu", make_activation("gelu", shaping=shaping, depth=24)))

    def network(c):
        for _ in range(24):
            c = np.polynomial.polynomial.polyval(c, squares)
        return c

    h = 1e-3
    one, two, three = network(1.0), network(1 - h), network(1 - 2 * h)
    assert abs(one - 1) < 1e-9
    assert abs((1.5 * one - 2 * two + 0.5 * three) / h - slope) < 1e-3
    if curvature is None:
        assert abs(network(0.0)) < 1e-12
    else:
        assert abs((one - 2 * two + three) / h**2 - curvature) < 0.01


@pytest.mark.parametrize("depth", [24, 48])
def test_the_leaky_relu_brings_two_uncorrelated_inputs_to_nine_tenths(depth):
    activation = make_activation("relu", shaping="tat", depth=depth)
    below, above = (float(activation(jnp.float64(x))) for x in (-1.0, 1.0))

    def coefficient(k):
        basis = [0] * k + [1]

        def integrand(x):
            return hermite_e.hermeval(x, basis) * x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi * math.factorial(k))

        right = scipy.integrate.quad(integrand, 0, 14, limit=200)[0]
        return (above + (-1) ** k * below) * right

    squares = np.square([coefficient(k) for k in range(80)])
    c = 0.0
    for _ in range(depth):
        c = np.polynomial.polynomial.polyval(c, squares)
    assert abs(c - 0.9) < 1e-4
    assert abs((above**2 + below**2) / 2 - 1) < 1e-12


def test_a_shallow_leaky_relu_is_relu():
    x = jnp.linspace(-2.0, 2.0, 9)
    for depth in (1, 6):
        np.testing.assert_allclose(tailored_leaky_relu(depth)(x), np.sqrt(2) * np.maximum(x, 0), rtol=1e-12)


@pytest.mark.parametrize("name, gain", [("gelu", 1.53353), ("relu", 1.41421), ("silu", 1.67653), ("tanh", 1.59254)])
def test_the_gain_is_that_of_a_standard_normal_input(name, gain):
    assert abs(preserving_gain(ACTIVATIONS[name]) - gain) < 1e-5
    activation = make_activation(name, gain="preserve")
    z = np.random.default_rng(0).normal(size=400_000)
    assert abs(np.mean(np.asarray(activation(jnp.asarray(z))) ** 2) - 1) < 0.02


def test_a_gain_multiplies_and_a_shaped_activation_has_unit_gain_already():
    x = jnp.linspace(-1.0, 1.0, 12)
    np.testing.assert_array_equal(make_activation("tanh", gain=2.0)(x), 2.0 * jnp.tanh(x))
    shaped = make_activation("tanh", shaping="dks", depth=6)
    twice = make_activation("tanh", gain=2.0, shaping="dks", depth=6)
    np.testing.assert_allclose(twice(x), 2 * shaped(x), rtol=1e-12)
    preserved = make_activation("tanh", gain="preserve", shaping="dks", depth=6)
    assert abs(preserved.gain / shaped.gain - 1) < 1e-10


def test_equal_arguments_give_equal_activations():
    # Models compare and hash their activations: unequal ones would be compiled anew.
    for arguments in (("gelu", "none"), ("tanh", "dks"), ("relu", "tat")):
        first, second = (make_activation(arguments[0], shaping=arguments[1], depth=6) for _ in range(2))
        assert first == second and hash(first) == hash(second)
    assert make_activation("gelu") != make_activation("gelu", gain=1.2)


def test_the_inside_is_float32_at_least():
    x = jnp.linspace(-3.0, 3.0, 40).astype(jnp.bfloat16)
    activation = make_activation("tanh", shaping="tat", depth=6)
    assert activation(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(activation(x), activation(x.astype(jnp.float32)).astype(jnp.bfloat16))


def test_a_solution_is_found_under_a_trace_and_without_x64():
    expected = make_activation("silu", shaping="dks", depth=3)
    found = []

    def trace(x):
        activations._solve.cache_clear()
        found.append(make_activation("silu", shaping="dks", depth=3))
        return found[0](x)

    with jax.enable_x64(False):
        assert jax.eval_shape(trace, jnp.ones(3, jnp.float32)).dtype == jnp.float32
    assert found == [expected]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name": "sine"}, "activation must be .*'sine'"),
        ({"shaping": "dsk"}, "activation_shaping must be .*'dsk'"),
        ({"gain": "unit"}, "activation_gain.*'unit'"),
        ({"gain": float("inf")}, "activation_gain.*inf"),
        ({"depth": 0}, "depth.*0"),
        ({"name": "relu", "shaping": "dks"}, "activation_shaping='dks'.*'relu'.*'tat'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_activation(**({"name": "gelu"} | arguments))
