"""The training loop: one system, compiled once, trained from any seed."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from osa_jax.data import SOURCES, Dataset, batch_indices, evaluation_batches, make_augmentation
from osa_jax.models import MODELS
from osa_jax.nn import SpectralConditioned
from osa_jax.training.config import check_config
from osa_jax.training.optimizers import make_optimizer
from osa_jax.training.saturation import SaturationWatch
from osa_jax.training.state import CreateModel, Metrics, TrainState, make_train_functions

Row = dict[str, float]


class Snapshot(NamedTuple):
    """What a run needs to go on as if never stopped: the batches follow from seed and `step`.

    `step` counts the steps done, `window` holds the metrics of those since the last row.
    """

    step: int
    state: TrainState
    window: list[Metrics]


class Moment(NamedTuple):
    """The run after a step: its snapshot, the step's metrics, and a row where one is due.

    The metrics may still be under way on the device. The next step consumes the snapshot's state.
    """

    snapshot: Snapshot
    metrics: Metrics
    row: Row | None


class Trainer:
    """What one config trains: its data, its model, its functions, each compiled once.

    Args:
      config: see `run_settings`; checked here, before anything is compiled.

    Raises:
      ValueError: naming the key of the config that is wrong.

    Example:
      See `configs/digits.py` for a config and `experiments/train.py` for a use.
    """

    def __init__(self, config: ConfigDict) -> None:
        self.config = check_config(config)
        data, model = self.config.data.to_dict(), self.config.model.to_dict()
        self.dataset = _load(SOURCES[data.pop("name")], **data)
        conditioning = model.pop("spectral_conditioning", None)
        create_model: CreateModel = functools.partial(
            MODELS[model.pop("name")],
            image_shape=self.dataset.image_shape,
            num_classes=self.dataset.num_classes,
            **model,
        )
        if conditioning:
            create_model = functools.partial(_create_conditioned, create_model, conditioning)
        with _errors_named("config.optimizer"):
            optimizer = make_optimizer(num_steps=self.num_steps, **self.config.optimizer.to_dict())
        with _errors_named("config.augment"):
            augment = make_augmentation(fill=self.dataset.black, **(self.config.augment or {}))
        with _errors_named("config.model"):
            self.functions = make_train_functions(
                create_model,
                optimizer,
                ema_decay=self.config.ema_decay,
                accumulate_steps=self.config.accumulate_steps,
                augment=augment,
            )

    @property
    def num_steps(self) -> int:
        """The optimiser steps of a run, rounded up where the config gives epochs."""
        config = self.config
        if config.num_steps is not None:
            return config.num_steps
        return math.ceil(config.epochs * len(self.dataset.train.labels) / config.batch_size)

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes and dtypes of the state."""
        return jax.eval_shape(self.functions.init, jax.random.key(0))

    @property
    def num_parameters(self) -> int:
        """The number of trained numbers."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_state.params))

    def fit(self, seed: int) -> Iterator[Row]:
        """Train from one seed and yield the rows, see `steps`."""
        return (moment.row for moment in self.steps(seed) if moment.row is not None)

    def steps(self, seed: int, *, start: Snapshot | None = None) -> Iterator[Moment]:
        """Train from one seed, or go on from a snapshot, and yield the moment after every step.

        A row is due every `eval_every` steps and at the end. It holds `step` (steps done), `epoch`,
        `train_loss`, `train_accuracy` and `gradient_norm` (means over the steps since the last
        row), `test_loss` and `test_accuracy` (the whole test set, after that step), and
        `steps_per_second` and `examples_per_second` (without compilation and evaluation).

        Args:
          seed: decides parameters, dropout and the order of the batches.
          start: where to go on; the state in it is consumed.

        Yields:
          The moment after each step.

        Raises:
          FloatingPointError: naming the first step whose loss or gradient was not finite.

        Warns:
          UserWarning: once, at a row, naming the projections of attention that train no longer.
        """
        config, train = self.config, self.dataset.train
        test = jax.device_put(evaluation_batches(self.dataset.test, batch_size=config.eval_batch_size))
        done, state, window = start or Snapshot(0, self.functions.init(jax.random.key(seed)), [])
        watch = SaturationWatch(state.params)
        timed_steps, began = 0, time.perf_counter()
        for step in range(done + 1, self.num_steps + 1):
            batch = batch_indices(step - 1, seed=seed, num_examples=len(train.labels), batch_size=config.batch_size)
            state, metrics = self.functions.train_step(state, train.images[batch], train.labels[batch])
            watch.on_step(metrics.pop("vanished"))
            window.append(metrics)
            timed_steps += 1
            if step == done + 1:
                jax.block_until_ready(metrics)
                timed_steps, began = 0, time.perf_counter()
            row: Row | None = None
            if step % config.eval_every == 0 or step == self.num_steps:
                row = _window_means(window, step)
                rate = timed_steps / (time.perf_counter() - began)
                row["epoch"] = step * config.batch_size / len(train.labels)
                row |= {"steps_per_second": rate, "examples_per_second": rate * config.batch_size}
                row |= _test_metrics(self.functions.evaluate(state, test), step)
                watch.on_row(step)
                window = []
            yield Moment(Snapshot(step, state, window), metrics, row)
            if row is not None:
                timed_steps, began = 0, time.perf_counter()


def _create_conditioned(create_model: CreateModel, options: dict[str, Any], **model_options: Any) -> nnx.Module:
    return SpectralConditioned(create_model(**model_options), **options)


@functools.lru_cache(maxsize=1)
def _load(source: Callable[..., Dataset], **options: Any) -> Dataset:
    """The data set, read once for all trainers of a comparison."""
    return source(**options)


@contextlib.contextmanager
def _errors_named(section: str) -> Iterator[None]:
    """The section of the config before an error about an argument in it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{section}: {error}") from error


def _window_means(window: list[Metrics], last_step: int) -> Row:
    """Means over the steps since the last row, or an error that names the first bad step."""
    values = {name: np.array([metrics[name] for metrics in jax.device_get(window)], np.float64) for name in window[0]}
    bad = ~(np.isfinite(values["loss"]) & np.isfinite(values["gradient_norm"]))
    if bad.any():
        first = int(np.argmax(bad))
        step = last_step - len(window) + 1 + first
        loss, norm = values["loss"][first], values["gradient_norm"][first]
        raise FloatingPointError(
            f"Training stopped: at step {step} the loss was {loss} and the gradient's norm {norm}. "
            "Lower config.optimizer.learning_rate or lengthen its warmup_steps."
        )
    return {
        "step": last_step,
        "train_loss": float(values["loss"].mean()),
        "train_accuracy": float(values["accuracy"].mean()),
        "gradient_norm": float(values["gradient_norm"].mean()),
    }


def _test_metrics(metrics: Metrics, step: int) -> Row:
    row = {f"test_{name}": float(metrics[name]) for name in ("loss", "accuracy")}
    if not np.isfinite(row["test_loss"]):
        raise FloatingPointError(
            f"Training stopped: after step {step} the test loss was {row['test_loss']}. "
            "Lower config.optimizer.learning_rate or lengthen its warmup_steps."
        )
    return row
