"""Spectral conditioning by config, and the warning for attention that trains no longer."""

import warnings

import jax
import numpy as np
import pytest

from osa_jax.data import evaluation_batches
from osa_jax.training import Trainer, changed, load_run, run
from osa_jax.training.saturation import SaturationWatch, vanished_projections
from tests.test_configs import CONFIGS, load_config, small


def config_of(conditioning, **values):
    config = small(load_config(CONFIGS[0], "vit"))
    model = {"depth": 1, "spectral_conditioning": conditioning}
    return changed(config, {"model": model, "num_steps": 20, "eval_every": 10} | values)


PATH = "config.model.spectral_conditioning"


@pytest.mark.parametrize(
    "conditioning, message",
    [
        ({"methd": "polar"}, f"{PATH}.methd is not a known key; did you mean 'method'"),
        ({"module": 1}, f"{PATH}.module is not a known key"),
        ({"lam": "10"}, f"{PATH}.lam must be of type float | .*Mapping.*, got '10'"),
        ({"lam": -1.0}, "config.model: lam must be finite and not negative, got -1.0"),
        ({"method": "svg"}, "config.model: method must be one of .* got 'svg'"),
        ({"select": "qkv"}, "config.model: select matches nothing with 'qkv'"),
    ],
)
def test_a_wrong_section_is_refused_before_anything_is_compiled(conditioning, message):
    with pytest.raises(ValueError, match=message):
        Trainer(config_of(conditioning))


def test_a_run_stores_what_it_trains_and_corrects_it_once_when_loaded(tmp_path):
    conditioning = {"lam": {"query": 1.0, "value": 10.0}}
    config = config_of(conditioning, num_steps=2, eval_every=1)
    rows = run(Trainer(config), seed=0, workdir=tmp_path)
    plain = config_of({}, num_steps=2, eval_every=1)
    assert rows[-1]["test_loss"] != list(Trainer(plain).fit(0))[-1]["test_loss"]
    trainer, snapshot = load_run(tmp_path, best=False)
    images = trainer.dataset.test.images[:8]
    model = trainer.functions.model(snapshot.state)
    logits = model(images, deterministic=True)
    np.testing.assert_allclose(jax.nn.softmax(logits), trainer.functions.predict(snapshot.state, images), atol=1e-6)
    start = trainer.functions.init(jax.random.key(0)).params
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), snapshot.state.params, start)
    assert max(jax.tree.leaves(moved)) < 0.1  # Two steps of the optimiser, and no C.
    batches = evaluation_batches(trainer.dataset.test, batch_size=trainer.config.eval_batch_size)
    loss = trainer.functions.evaluate(snapshot.state, batches)["loss"]
    np.testing.assert_allclose(float(loss), rows[-1]["test_loss"], rtol=1e-6)


def test_a_saturated_softmax_is_told_once_by_its_layer():
    with warnings.catch_warnings(record=True, action="always") as caught:
        list(Trainer(config_of({"lam": {"query": 1e3, "key": 1e3}}, num_steps=30)).fit(0))
    (warning,) = caught
    names = [f"spectrally_conditioned/blocks/0/attention/{name}/kernel" for name in ("key", "query")]
    assert f"until step 10 no gradient reached {', '.join(names)}: if softmax" in str(warning.message)


@pytest.mark.parametrize("conditioning", [{}, {"lam": 1.0}, {"method": "polar"}])
def test_a_healthy_run_is_silent(conditioning):
    assert len(list(Trainer(config_of(conditioning)).fit(0))) == 2


def test_the_watch_judges_by_most_of_enough_steps():
    watch = SaturationWatch({"query/kernel": np.ones((2, 2)), "key/kernel": np.ones((2, 2))})
    for _ in range(9):
        watch.on_step(np.array([False, True]))
    watch.on_row(9)  # Not enough steps: they are kept.
    watch.on_step(np.array([False, False]))
    with pytest.warns(UserWarning, match="step 10 no gradient reached query/kernel: if"):
        watch.on_row(10)
    for _ in range(20):
        watch.on_step(np.array([True, True]))
    watch.on_row(30)  # Told already.
    half = SaturationWatch({"query/kernel": np.ones((2, 2))})
    for step in range(10):
        half.on_step(np.array([step % 2 == 0]))
    half.on_row(10)


def test_a_model_without_projections_is_not_watched():
    params = {"out": {"kernel": np.ones((2, 2))}}
    assert vanished_projections(params).shape == (0,)
    watch = SaturationWatch(params)
    for _ in range(10):
        watch.on_step(vanished_projections(params))
    watch.on_row(10)
