"""Schedules against closed formulas, Lion and Muon against their definitions in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osa_jax.training import make_optimizer, make_schedule

STEPS, WARMUP, PEAK = 20, 4, 0.5


def share(step):
    return (step - WARMUP) / (STEPS - WARMUP)


@pytest.mark.parametrize(
    "schedule, formula",
    [
        ("cosine", lambda step: (1 + np.cos(np.pi * share(step))) / 2),
        ("linear", lambda step: 1 - share(step)),
        ("wsd", lambda step: min(1.0, (STEPS - step) / 5)),
    ],
)
def test_schedules_are_their_formulas(schedule, formula):
    rate = make_schedule(schedule, num_steps=STEPS, learning_rate=PEAK, warmup_steps=WARMUP, decay_fraction=0.25)
    expected = [PEAK * (step / WARMUP if step < WARMUP else formula(step)) for step in range(STEPS + 1)]
    np.testing.assert_allclose([rate(step) for step in range(STEPS + 1)], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_schedules_without_warmup_start_at_the_peak(schedule):
    rate = make_schedule(schedule, num_steps=3, learning_rate=PEAK, warmup_steps=0, decay_fraction=1.0)
    np.testing.assert_allclose([rate(0), rate(3)], [PEAK, 0], atol=1e-7)


def params():
    rng = np.random.default_rng(0)
    shapes = {"kernel": (4, 3), "bias": (3,)}
    layers = {
        "hidden": shapes,
        "query": {"kernel": (4, 2, 3), "bias": (2, 3)},
        "out": {"kernel": (2, 3, 5)},
        "scale": {"alpha": (2,)},
    }
    return {
        layer: {name: jnp.asarray(rng.normal(size=shape)) for name, shape in parts.items()}
        for layer, parts in layers.items()
    }


@functools.cache
def first_updates(**options):
    """The gradient, and the parameters' first change at the full learning rate, without clipping."""
    start = params()
    gradient = jax.tree.map(lambda leaf: jnp.sin(7 * leaf), start)
    optimizer = make_optimizer(**{"num_steps": 10, "learning_rate": 0.1, "warmup_steps": 0, "clip_norm": 1e9} | options)
    updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(start), start)
    return start, gradient, updates


def test_lion_steps_by_the_sign():
    start, gradient, updates = first_updates(name="lion", weight_decay=0.3)
    for layer, parts in updates.items():
        for name, update in parts.items():
            value = np.array(start[layer][name])
            decay = 0.3 * value if name == "kernel" else 0
            np.testing.assert_allclose(update, -0.1 * (np.sign(gradient[layer][name]) + decay), rtol=1e-6)


@pytest.mark.parametrize("layer, matrix", [("hidden", (4, 3)), ("query", (4, 6)), ("out", (6, 5))])
def test_muon_orthogonalises_every_kernel_as_a_matrix_of_inputs_and_outputs(layer, matrix):
    _, gradient, updates = first_updates(name="muon")
    u, _, vt = np.linalg.svd(np.array(gradient[layer]["kernel"]).reshape(matrix), full_matrices=False)
    scaled = np.array(updates[layer]["kernel"]).reshape(matrix) / (-0.1 * 0.2 * np.sqrt(max(matrix)))
    inner = u.T @ scaled @ vt.T
    # Five steps of its iteration bring the singular values near 1, and keep the singular vectors.
    np.testing.assert_allclose(np.diag(inner), 1, atol=0.35)
    np.testing.assert_allclose(inner, np.diag(np.diag(inner)), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(scaled), np.linalg.norm(inner), rtol=1e-6)


def test_muon_leaves_what_is_no_kernel_to_adam():
    _, gradient, updates = first_updates(name="muon")
    # The first step of Adam with Nesterov's momentum: b m / (1 - b^2) + (1 - b) g / (1 - b), m = (1 - b) g.
    size = 0.1 * (0.9 * 0.1 / (1 - 0.9**2) + 1)
    for layer, name in (("query", "bias"), ("hidden", "bias"), ("scale", "alpha")):
        np.testing.assert_allclose(updates[layer][name], -size * np.sign(gradient[layer][name]), rtol=1e-5)


@pytest.mark.parametrize("name, factor", [("adamw", 4.0), ("lion", 4.0), ("muon", 4.0), ("adamw", 0.0)])
def test_the_factor_of_alpha_acts_on_alpha_alone(name, factor):
    _, _, plain = first_updates(name=name, weight_decay=0.1)
    _, _, scaled = first_updates(name=name, weight_decay=0.1, alpha_learning_rate_factor=factor)
    plain = plain | {"scale": {"alpha": factor * plain["scale"]["alpha"]}}
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-12), scaled, plain)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_factor_of_the_blocks_acts_on_all_that_is_in_them(name):
    start = {"blocks": [params()], "head": params()["hidden"]}
    options = {"num_steps": 10, "learning_rate": 0.1, "warmup_steps": 0, "clip_norm": 1e9, "weight_decay": 0.1}

    def first(factor):
        optimizer = make_optimizer(name=name, block_learning_rate_factor=factor, **options)
        return jax.jit(optimizer.update)(start, optimizer.init(start), start)[0]

    plain, scaled = first(1.0), first(0.25)
    plain["blocks"] = jax.tree.map(lambda leaf: 0.25 * leaf, plain["blocks"])
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-12), scaled, plain)
