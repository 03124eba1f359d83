"""Training steps against numpy, whole-set evaluation, the stops of the loop, config errors."""

import io
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ml_collections import ConfigDict
from rich.console import Console

from osa_jax.data import Dataset, Split, batch_indices, evaluation_batches
from osa_jax.training import (
    Trainer,
    Variant,
    check_config,
    judge,
    make_optimizer,
    make_train_functions,
    prepare_workdir,
    read_rows,
    run,
    run_grid,
)
from osa_jax.training.progress import RunProgress
from tests.helpers import run_python

F64 = 1e-12


class Linear(nnx.Module):
    """Softmax regression in float64 on flattened images, started away from zero."""

    def __init__(self, *, rngs, image_shape=(2, 2, 1), num_classes=3, blow_up_at=None):
        features = int(np.prod(image_shape))
        init = nnx.initializers.normal(1.0)
        self.kernel = nnx.Param(init(rngs.params(), (features, num_classes), jnp.float64))
        self.bias = nnx.Param(jnp.zeros((1, num_classes), jnp.float64))
        self.scale = nnx.Param(jnp.ones(num_classes, jnp.float64))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.blow_up_at = blow_up_at

    def __call__(self, images, *, deterministic):
        flat = images.reshape(len(images), -1).astype(jnp.float64)
        logits = (flat @ self.kernel[...] + self.bias[...]) * self.scale[...][None]
        if not deterministic:
            self.calls[...] += 1
            if self.blow_up_at is not None:
                logits = jnp.where(self.calls[...] >= self.blow_up_at, jnp.nan, logits)
        return logits


def random_split(num_examples, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(num_examples, 2, 2, 1)).astype(np.float32)
    return Split(images, rng.integers(3, size=num_examples, dtype=np.int32))


def softmax_regression(params, images, labels):
    """Loss, accuracy and gradient of `Linear`, in numpy and by hand."""
    flat = images.reshape(len(images), -1).astype(np.float64)
    inner = flat @ params["kernel"] + params["bias"]
    logits = inner * params["scale"]
    exps = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = exps / exps.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(probabilities[rows, labels]).mean()
    accuracy = (logits.argmax(1) == labels).mean()
    error = (probabilities - np.eye(3)[labels]) / len(labels)
    gradient = {
        "kernel": flat.T @ (error * params["scale"]),
        "bias": (error * params["scale"]).sum(0, keepdims=True),
        "scale": (error * inner).sum(0),
    }
    return loss, accuracy, gradient


def numpy_of(state):
    return {name: np.array(leaf) for name, leaf in nnx.to_pure_dict(state).items()}


def test_train_steps_equal_hand_written_adamw_with_clipping_and_schedule():
    settings = {"learning_rate": 0.1, "warmup_steps": 2, "weight_decay": 0.3, "clip_norm": 0.2}
    num_steps = 6
    functions = make_train_functions(Linear, make_optimizer(num_steps=num_steps, **settings))
    state = functions.init(jax.random.key(1))
    params = numpy_of(state.params)
    assert sorted(params) == ["bias", "kernel", "scale"]
    mean = {name: np.zeros_like(value) for name, value in params.items()}
    square = {name: np.zeros_like(value) for name, value in params.items()}
    for step in range(num_steps):
        images, labels = random_split(5, seed=step)
        loss, accuracy, gradient = softmax_regression(params, images, labels)
        norm = np.sqrt(sum((value**2).sum() for value in gradient.values()))
        if step < 2:
            rate = 0.1 * step / 2
        else:
            rate = 0.1 * (1 + np.cos(np.pi * (step - 2) / (num_steps - 2))) / 2
        state, metrics = functions.train_step(state, images, labels)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=F64)
        np.testing.assert_allclose(metrics["accuracy"], accuracy, rtol=F64)
        np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=F64)
        for name, value in gradient.items():
            clipped = value * min(1, 0.2 / norm)
            mean[name] = 0.9 * mean[name] + 0.1 * clipped
            square[name] = 0.999 * square[name] + 0.001 * clipped**2
            update = (mean[name] / (1 - 0.9 ** (step + 1))) / (np.sqrt(square[name] / (1 - 0.999 ** (step + 1))) + 1e-8)
            decay = 0.3 * params[name] if name == "kernel" else 0
            # The schedule's learning rate is float32 in optax.
            change = nnx.to_pure_dict(state.params)[name] - params[name]
            np.testing.assert_allclose(change, -rate * (update + decay), rtol=1e-6, atol=1e-12)
        params = numpy_of(state.params)


def test_the_models_other_state_is_carried_through_the_steps():
    functions = make_train_functions(Linear, optax.sgd(0.1))
    state = functions.init(jax.random.key(0))
    for _ in range(3):
        state, _ = functions.train_step(state, *random_split(4))
    functions.evaluate(state, evaluation_batches(random_split(4), batch_size=2))
    assert int(nnx.to_pure_dict(state.rest)["calls"]) == 3


@pytest.mark.parametrize("batch_size", [1, 7, 23, 128])
def test_evaluation_equals_numpy_for_any_batch_size(batch_size):
    split = random_split(23)
    functions = make_train_functions(Linear, optax.sgd(0.1))
    state = functions.init(jax.random.key(0))
    loss, accuracy, _ = softmax_regression(numpy_of(state.params), *split)
    metrics = functions.evaluate(state, evaluation_batches(split, batch_size=batch_size))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=F64)
    np.testing.assert_allclose(metrics["accuracy"], accuracy, rtol=F64)


def one_step_of(parts=1, **options):
    """Two steps of `Linear` on 12 images; the state after them and the last metrics."""
    functions = make_train_functions(Linear, optax.adam(0.1), accumulate_steps=parts, **options)
    state = functions.init(jax.random.key(1))
    for seed in (0, 1):
        state, metrics = functions.train_step(state, *random_split(12, seed=seed))
    return state, metrics


@pytest.mark.parametrize("parts", [3, 12])
def test_accumulated_parts_make_the_same_step_as_the_whole_batch(parts):
    state, metrics = one_step_of()
    in_parts, metrics_of_parts = one_step_of(parts)
    for name, value in numpy_of(in_parts.params).items():
        np.testing.assert_allclose(value, numpy_of(state.params)[name], rtol=1e-9, atol=F64)
    for name, value in metrics.items():
        np.testing.assert_allclose(metrics_of_parts[name], value, rtol=F64)
    assert int(nnx.to_pure_dict(in_parts.rest)["calls"]) == 2 * parts


def test_the_moving_average_follows_its_recurrence_and_is_what_is_evaluated():
    functions = make_train_functions(Linear, optax.sgd(0.5), ema_decay=0.7)
    state = functions.init(jax.random.key(1))
    average = numpy_of(state.params)
    for seed in range(4):
        state, _ = functions.train_step(state, *random_split(5, seed=seed))
        average = {name: 0.7 * average[name] + 0.3 * value for name, value in numpy_of(state.params).items()}
    for name, value in numpy_of(state.ema).items():
        np.testing.assert_allclose(value, average[name], rtol=1e-7)
    model = functions.model(state)
    np.testing.assert_array_equal(model.kernel[...], state.ema["kernel"][...])
    assert int(model.calls[...]) == 4
    split = random_split(9)
    loss, _, _ = softmax_regression(numpy_of(state.ema), *split)
    metrics = functions.evaluate(state, evaluation_batches(split, batch_size=4))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=F64)
    assert abs(loss - softmax_regression(numpy_of(state.params), *split)[0]) > 1e-3


def test_confusion_and_probabilities_equal_numpy():
    functions = make_train_functions(Linear, optax.sgd(0.1))
    state = functions.init(jax.random.key(0))
    images, labels = random_split(23)
    params = numpy_of(state.params)
    logits = (images.reshape(23, -1) @ params["kernel"] + params["bias"]) * params["scale"]
    exps = np.exp(logits)
    got = functions.predict(state, images)
    np.testing.assert_allclose(got, exps / exps.sum(1, keepdims=True), rtol=1e-10)
    confusion = np.zeros((3, 3))
    np.add.at(confusion, (labels, logits.argmax(1)), 1)
    metrics = functions.evaluate(state, evaluation_batches(Split(images, labels), batch_size=7))
    np.testing.assert_array_equal(metrics["confusion"], confusion)
    np.testing.assert_allclose(metrics["accuracy"], np.trace(confusion) / 23)


def test_augmentation_gets_a_new_key_every_step_which_seed_and_step_decide():
    def noisy(key, images):
        return images + jax.random.normal(key, images.shape, images.dtype)

    augmented = make_train_functions(Linear, optax.sgd(0.1), augment=noisy)
    plain = make_train_functions(Linear, optax.sgd(0.1))
    images, labels = random_split(5)
    states = augmented.init(jax.random.key(4)), plain.init(jax.random.key(4))
    losses = []
    for step in range(2):
        changed = noisy(jax.random.fold_in(states[0].key, step), images)
        (one, metrics), (other, expected) = (
            augmented.train_step(states[0], images, labels),
            plain.train_step(states[1], changed, labels),
        )
        states = one, other
        losses.append(float(metrics["loss"]))
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    assert abs(losses[0] - losses[1]) > 1e-3
    assert states[0].key != jax.random.key(4) and int(states[0].step) == 2


def test_judge_is_float32_at_least():
    logits = jnp.array([[300.0, -300.0], [0.0, 0.0]], jnp.bfloat16)
    losses, hits = judge(logits, jnp.array([1, 0]))
    assert losses.dtype == hits.dtype == jnp.float32
    np.testing.assert_allclose(losses, [600.0, np.log(2)], rtol=1e-6)
    np.testing.assert_array_equal(hits, [0, 1])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"warmup_steps": 10}, r"warmup_steps must lie in \[0, num_steps\), got 10"),
        ({"learning_rate": 0.0}, "learning_rate .* got 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate .* got nan"),
        ({"weight_decay": -1.0}, "weight_decay .* got -1.0"),
        ({"clip_norm": 0.0}, "clip_norm .* got 0.0"),
        ({"block_learning_rate_factor": np.nan}, "block_learning_rate_factor .*not negative, got nan"),
        ({"alpha_learning_rate_factor": -1.0}, "alpha_learning_rate_factor .*not negative, got -1.0"),
        ({"name": "adam"}, "name must be one of .*'adamw'.* got 'adam'"),
        ({"schedule": "cosin"}, "schedule must be one of .*'cosine'.* got 'cosin'"),
        ({"schedule": "wsd", "decay_fraction": 0.0}, r"decay_fraction must lie in \(0, 1\], got 0.0"),
    ],
)
def test_make_optimizer_refuses_bad_numbers(change, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(**{"num_steps": 10, "learning_rate": 0.1, "warmup_steps": 1} | change)


def linear_config(**changes):
    config = {
        "seed": 0,
        "num_steps": 7,
        "batch_size": 4,
        "eval_batch_size": 5,
        "eval_every": 3,
        "data": {"name": "random"},
        "model": {"name": "linear"},
        "optimizer": {"learning_rate": 0.05, "warmup_steps": 2},
    }
    return ConfigDict(config | changes)


@pytest.fixture
def linear_world(monkeypatch):
    """A world whose one model is softmax regression and whose one data set is random."""

    def make_linear(*, image_shape, num_classes, blow_up_at: int | None = None, rngs):
        return Linear(image_shape=image_shape, num_classes=num_classes, blow_up_at=blow_up_at, rngs=rngs)

    def make_data(*, num_test: int = 11):
        return Dataset(random_split(13, seed=1), random_split(num_test, seed=2), 3)

    monkeypatch.setitem(sys.modules["osa_jax.data"].SOURCES, "random", make_data)
    monkeypatch.setitem(sys.modules["osa_jax.models"].MODELS, "linear", make_linear)


@pytest.mark.usefixtures("linear_world")
def test_rows_are_window_means_and_whole_set_metrics():
    trainer = Trainer(linear_config())
    moments = list(trainer.steps(5))
    rows = [moment.row for moment in moments if moment.row]
    assert [moment.snapshot.step for moment in moments] == list(range(1, 8))
    assert [row["step"] for row in rows] == [3, 6, 7]

    state = trainer.functions.init(jax.random.key(5))
    losses = []
    for step in range(7):
        batch = batch_indices(step, seed=5, num_examples=13, batch_size=4)
        images, labels = trainer.dataset.train.images[batch], trainer.dataset.train.labels[batch]
        losses.append(softmax_regression(numpy_of(state.params), images, labels)[0])
        state, _ = trainer.functions.train_step(state, images, labels)
    windows = [np.mean(losses[:3]), np.mean(losses[3:6]), losses[6]]
    np.testing.assert_allclose([row["train_loss"] for row in rows], windows, rtol=F64)
    loss, accuracy, _ = softmax_regression(numpy_of(state.params), *trainer.dataset.test)
    np.testing.assert_allclose(rows[-1]["test_loss"], loss, rtol=F64)
    np.testing.assert_allclose(rows[-1]["test_accuracy"], accuracy, rtol=F64)
    assert rows[-1]["epoch"] == 28 / 13 and all(row["steps_per_second"] > 0 for row in rows)
    assert trainer.num_parameters == 4 * 3 + 3 + 3


@pytest.mark.usefixtures("linear_world")
def test_a_seed_is_one_run_and_another_seed_another():
    trainer = Trainer(linear_config())
    keys = ("train_loss", "test_loss")
    runs = [[[row[key] for key in keys] for row in trainer.fit(seed)] for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.usefixtures("linear_world")
@pytest.mark.parametrize("step", [1, 3, 5, 7])
def test_the_non_finite_stop_names_the_first_bad_step(step, tmp_path):
    trainer = Trainer(linear_config(model={"name": "linear", "blow_up_at": step}))
    with pytest.raises(FloatingPointError, match=f"at step {step} the loss was nan.*learning_rate"):
        run(trainer, seed=0, workdir=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 6][: (step - 1) // 3]


@pytest.mark.usefixtures("linear_world")
def test_a_run_keeps_its_config_and_rows_and_refuses_a_second_one(tmp_path, capsys):
    trainer = Trainer(linear_config())
    rows = run(trainer, seed=3, workdir=tmp_path / "a" / "b", label="linear")
    lines = (tmp_path / "a" / "b" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    config = json.loads((tmp_path / "a" / "b" / "config.json").read_text())
    assert config.items() >= linear_config(seed=3).to_dict().items()
    assert "linear: step 7/7, loss" in capsys.readouterr().err
    with pytest.raises(ValueError, match="already holds a run: choose another"):
        run(trainer, seed=3, workdir=tmp_path / "a" / "b")


@pytest.mark.usefixtures("linear_world")
def test_a_grid_runs_what_is_missing_and_finds_a_wrong_config_before_the_first_run(tmp_path, capsys):
    short = Variant("short", linear_config(num_steps=3))
    wrong = Variant("wrong", linear_config(batch_size=-1))
    with pytest.raises(ValueError, match="batch_size must be at least 1, got -1"):
        run_grid({"a": short, "b": wrong}, seeds=[4, 6], workdir=tmp_path)
    assert list(tmp_path.iterdir()) == []

    one = run_grid({"a": short}, seeds=[4], workdir=tmp_path)
    accuracy = 100 * one["short"][0][-1]["test_accuracy"]
    assert f"short: test accuracy {accuracy:.1f} % (" in capsys.readouterr().out
    both = {"a": short, "b": Variant("long", linear_config())}
    runs = run_grid(both, seeds=[4, 6], workdir=tmp_path, resume=True)
    assert {label: [[row["step"] for row in rows] for rows in seeds] for label, seeds in runs.items()} == {
        "short": [[3], [3]],
        "long": [[3, 6, 7], [3, 6, 7]],
    }
    assert runs["short"][0] == one["short"][0]  # Timings and all: not run again.
    assert runs["short"][1] == read_rows(tmp_path / "a" / "seed6")
    assert json.loads((tmp_path / "a" / "seed6" / "config.json").read_text())["seed"] == 6


def test_prepare_workdir_refuses_what_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="cannot be written .*: choose another folder"):
            prepare_workdir(path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_step": 3}, "config.num_step is not a known key; did you mean 'num_steps'?"),
        (
            {"optimizer": {"learning_rat": 1.0}},
            "config.optimizer.learning_rat is .*'learning_rate'",
        ),
        ({"optimizer": {"learning_rate": 1.0}}, "config.optimizer.warmup_steps is missing"),
        ({"optimizer": 3}, "config.optimizer must be of type Mapping, got 3"),
        ({"model": {"name": "vit", "widht": 3}}, "config.model.widht is not .*'width'"),
        ({"model": {"name": "vot"}}, r"config.model.name must be one of .*'vit'.* got 'vot'"),
        ({"model": {"name": "vit", "width": "64"}}, "config.model.width must be of type int"),
        ({"model": {"name": "vit", "skip": 1}}, "config.model.skip must be of type bool, got 1"),
        ({"model": {"name": "vit", "rngs": 1}}, "config.model.rngs is not a known key"),
        ({"model": {"name": "vit", "alpha": True}}, "config.model.alpha must be of type float"),
        ({"data": {}}, "config.data.name must be one of .*'digits'.* got None"),
        ({"data": {"name": "digits", "zzz": 1}}, r"config.data.zzz is not .*; the keys are \[\]"),
        ({"batch_size": 1.5}, "config.batch_size must be of type int, got 1.5"),
        ({"num_steps": True}, "config.num_steps must be of type int, got True"),
        ({"eval_every": 0}, "config.eval_every must be at least 1, got 0"),
        ({"seed": -1}, "config.seed must not be negative, got -1"),
        ({"epochs": 2}, "config.num_steps and config.epochs must be given, got both"),
        ({"num_steps": None}, "config.num_steps and config.epochs must be given, got neither"),
        ({"num_steps": None, "epochs": -0.5}, "config.epochs must be a positive finite number, got -0.5"),
        ({"accumulate_steps": 3}, "config.accumulate_steps must divide batch_size, got 3 and 4"),
        ({"ema_decay": 1.0}, r"config.ema_decay must lie in \[0, 1\), got 1.0"),
        ({"checkpoint": {"evry": 3}}, "config.checkpoint.evry is .*'every'"),
        ({"checkpoint": {"keep": 0}}, "config.checkpoint.keep must be at least 1, got 0"),
        ({"optimizer": {"learning_rate": 1.0, "warmup_steps": 9}}, "config.optimizer: warmup_steps must"),
        ({"model": {"name": "vit", "dtype": "bfloat61"}}, "config.model.dtype must be .*'bfloat16', got 'bfloat61'"),
        ({"model": {"name": "vit", "param_dtype": None}}, "config.model.param_dtype must be .* got None"),
    ],
)
@pytest.mark.usefixtures("linear_world")
def test_a_wrong_config_raises_with_the_key(change, message):
    with pytest.raises(ValueError, match=message):
        Trainer(linear_config(**change))


@pytest.mark.usefixtures("linear_world")
def test_epochs_count_passes_over_the_training_images():
    trainer = Trainer(linear_config(num_steps=None, epochs=2))
    assert trainer.num_steps == 7  # 26 images in batches of 4
    assert list(trainer.fit(0))[-1]["epoch"] == 28 / 13


@pytest.mark.usefixtures("linear_world")
def test_a_checked_config_cannot_change():
    config = check_config(linear_config())
    with pytest.raises(AttributeError):
        config.num_steps = 3


def test_progress_bar_on_a_terminal_shows_the_newest_numbers():
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    with RunProgress("osa", 3, console=screen) as progress:
        for step in (1, 2, 3):
            progress.on_step(step, {"loss": jnp.float32(1 / step), "accuracy": jnp.float32(0.5)})
    text = screen.file.getvalue()
    assert "3/3" in text and "loss 0.333, accuracy 50.0 %" in text and "steps/s" in text


INTERRUPTED = """
import os, signal
from osa_jax.training import one_line_errors
signal.signal(signal.SIGINT, signal.default_int_handler)
with one_line_errors():
    os.kill(os.getpid(), signal.SIGINT)
    import time
    time.sleep(10)
"""


def test_ctrl_c_ends_with_one_line_and_exit_code_130():
    result = run_python(INTERRUPTED)
    assert result.returncode == 130
    assert result.stderr == "Interrupted: what was written so far is kept.\n"
