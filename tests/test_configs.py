"""Every config file: loaded, locked, checked, built, and run for a step in each of its systems."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from osa_jax.data import SOURCES, Dataset, Split, evaluation_batches
from osa_jax.training import FIGURE_1, SYSTEMS, Trainer, changed, system_of, system_variant

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))


def load_config(path, system=None):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(system)


def small(config):
    """The same config, small enough to compile quickly."""
    config.update({"num_steps": 1, "epochs": None, "batch_size": 4, "optimizer": {"warmup_steps": 0}})
    config.model.update({"width": 16, "depth": 2, "num_heads": 2})
    if config.model.qk_features:
        config.model.qk_features = 8
    return config.lock()


@pytest.fixture(autouse=True)
def random_mnist(monkeypatch):
    """Random images in place of the files that configs name."""

    def load(*, dir: str | None = None):
        images = np.random.default_rng(0).normal(size=(40, 28, 28, 1)).astype(np.float32)
        test = Split(images, np.arange(40, dtype=np.int32) % 10)
        return Dataset(Split(*(np.concatenate([part] * 100) for part in test)), test, 10)

    for name in ("mnist", "fashion_mnist"):
        monkeypatch.setitem(SOURCES, name, load)


def test_there_are_configs_to_test():
    assert [path.name for path in CONFIGS] == ["digits.py", "fashion_mnist.py", "mnist.py"]


EVERY_SYSTEM_ONCE = [(CONFIGS[0], system) for system in SYSTEMS] + [(path, "osa") for path in CONFIGS[1:]]


@pytest.mark.parametrize("path, system", EVERY_SYSTEM_ONCE, ids=lambda value: getattr(value, "stem", value))
def test_every_config_and_every_system_trains_a_step(path, system):
    trainer = Trainer(small(load_config(path, system)))
    (row,) = trainer.fit(0)
    # The classifier starts at zero, so the first loss is that of ten equal guesses.
    assert row["step"] == 1 and row["gradient_norm"] > 0
    np.testing.assert_allclose(row["train_loss"], np.log(10), rtol=1e-6)
    assert row["test_loss"] != pytest.approx(np.log(10), abs=1e-6)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_build_at_full_size_and_differ_in_the_systems_switches_alone(path):
    plain = load_config(path).to_dict()
    assert Trainer(load_config(path).lock()).num_parameters > 10_000
    for name, system in SYSTEMS.items():
        values = load_config(path, name).to_dict()
        assert values["model"] == plain["model"] | system.model
        assert values["optimizer"] == plain["optimizer"] | system.optimizer
        assert values | {"model": None, "optimizer": None} == plain | {"model": None, "optimizer": None}


def test_without_skips_the_blocks_learn_more_slowly_in_every_comparison():
    for name, (_, skip, *_) in SWITCHES.items():
        factor = 1.0 if skip else 1 / 3
        assert load_config(CONFIGS[0], name).optimizer.block_learning_rate_factor == factor
        assert system_variant(load_config(CONFIGS[0]), name).config.optimizer.block_learning_rate_factor == factor


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_locked_config_refuses_unknown_keys_and_unknown_systems(path):
    config = load_config(path).lock()
    assert isinstance(config, ConfigDict) and config.is_locked
    with pytest.raises((AttributeError, KeyError), match="batch_size"):
        config.batch_sizes = 3
    with pytest.raises(ValueError, match="must be one of .*'osa_qr'.* got 'osa_rq'"):
        load_config(path, "osa_rq")


# A row: attention, skip, norm, init, activation_gain, activation_shaping.
SWITCHES = {
    "vit": ("softmax", True, True, "standard", 1.0, "none"),
    "vit_no_skip": ("softmax", False, True, "standard", 1.0, "none"),
    "vit_no_skip_no_norm": ("softmax", False, False, "standard", 1.0, "none"),
    "osa": ("orthogonal", False, False, "orthogonal", 1.0, "dks"),
    "osa_qr": ("orthogonal", False, False, "orthogonal", 1.0, "dks"),
    "osa_newton_schulz": ("orthogonal", False, False, "orthogonal", 1.0, "dks"),
    "value_skipinit": ("value_skipinit", False, False, "orthogonal", 1.0, "dks"),
    "shaped": ("shaped", False, False, "orthogonal", 1.0, "tat"),
    "e_spa": ("e_spa", False, False, "orthogonal", 1.0, "dks"),
    "cutting_the_skip": ("softmax", False, True, "cutting_the_skip", 1.0, "none"),
    "ns_attention": ("ns_attention", True, True, "standard", 1.0, "none"),
}


def test_every_system_has_its_paper_s_switches():
    names = ("attention", "skip", "norm", "init", "activation_gain", "activation_shaping")
    assert {name: tuple(map(system.model.get, names)) for name, system in SYSTEMS.items()} == SWITCHES
    assert FIGURE_1 == tuple(SWITCHES)[:6]


def test_the_systems_share_one_set_of_switches():
    for system in SYSTEMS.values():
        switches = set(system.model) - {"qk_features"}
        assert switches == {"activation_gain", "activation_shaping", "attention", "init", "method", "norm", "skip"}
        orthogonal = system.model["attention"] == "orthogonal"
        assert orthogonal != ("qk_features" in system.model)
    assert len({system.label for system in SYSTEMS.values()}) == len(SYSTEMS)


def test_a_system_is_told_by_its_switches_and_made_of_any_other():
    for name in SYSTEMS:
        model = load_config(CONFIGS[0], name).model
        assert system_of(model) == name
        for other in SYSTEMS:
            label, config = system_variant(load_config(CONFIGS[0], other), name)
            assert label == SYSTEMS[name].label and system_of(config.model) == name
            assert system_variant(config, other).config.model.depth == model.depth
    osa = load_config(CONFIGS[0], "osa")
    assert system_of(changed(osa, {"model": {"activation_gain": "preserve"}}).model) is None
    assert osa.model.activation_gain == 1.0  # The original stays.
    with pytest.raises(ValueError, match="system must be one of .*'osa_qr'.* got 'osa_rq'"):
        system_variant(osa, "osa_rq")


def test_dropout_draws_a_new_mask_at_every_step_and_none_in_evaluation():
    config = small(load_config(CONFIGS[0], "osa")).unlock()
    config.model.dropout_rate = 0.5
    config.optimizer.learning_rate = 1e-30
    config.update({"num_steps": 2, "eval_every": 1})
    trainer = Trainer(config)
    state = trainer.functions.init(jax.random.key(0))
    # The classifier starts at zero: only other kernels let the logits, and the loss, see the mask.
    moved = jax.tree.map(lambda leaf: leaf + 0.1 * np.cos(np.arange(leaf.size)).reshape(leaf.shape), state.params)
    state = state._replace(params=jax.tree.map(lambda new, old: new.astype(old.dtype), moved, state.params))
    images, labels = trainer.dataset.train.images[:4], trainer.dataset.train.labels[:4]
    batches = evaluation_batches(trainer.dataset.test, batch_size=180)
    first = trainer.functions.evaluate(state, batches)["loss"]
    state, one = trainer.functions.train_step(state, images, labels)
    state, two = trainer.functions.train_step(state, images, labels)
    assert one["loss"] != two["loss"]
    np.testing.assert_allclose(trainer.functions.evaluate(state, batches)["loss"], first, rtol=1e-6)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters():
    config = small(load_config(CONFIGS[0], "osa")).unlock()
    config.update({"num_steps": 2, "eval_every": 1})
    config.model.update({"depth": 1, "dtype": "bfloat16"})
    trainer = Trainer(config)
    assert {leaf.dtype for leaf in jax.tree.leaves(trainer.abstract_state.params)} == {np.dtype("float32")}
    images = jax.ShapeDtypeStruct((3, 8, 8, 1), np.float32)
    program = jax.make_jaxpr(trainer.functions.predict)(trainer.abstract_state, images)
    assert "bf16[3,10]" in str(program) and program.out_avals[0].dtype == np.float32
    first, second = trainer.fit(0)
    np.testing.assert_allclose(first["train_loss"], np.log(10), rtol=1e-6)
    assert np.isfinite(second["train_loss"]) and second["test_loss"] != pytest.approx(np.log(10), abs=1e-6)
