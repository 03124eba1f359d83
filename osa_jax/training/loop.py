"""The training loop: one system, compiled once, trained from any seed."""

import functools
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
from ml_collections import ConfigDict

from osa_jax.data import SOURCES, batch_indices, evaluation_batches
from osa_jax.models import MODELS
from osa_jax.training.config import check_config
from osa_jax.training.state import Metrics, make_optimizer, make_train_functions

Row = dict[str, float]
OnStep = Callable[[int, Metrics], None]


class Trainer:
    """What one config trains: its data, its model, its jitted functions.

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
        self.dataset = SOURCES[data.pop("name")](**data)
        create_model = functools.partial(
            MODELS[model.pop("name")],
            image_shape=self.dataset.image_shape,
            num_classes=self.dataset.num_classes,
            **model,
        )
        optimizer = make_optimizer(num_steps=self.config.num_steps, **self.config.optimizer.to_dict())
        self.functions = make_train_functions(create_model, optimizer)

    @functools.cached_property
    def num_parameters(self) -> int:
        """The number of trained numbers."""
        params = jax.eval_shape(self.functions.init, jax.random.key(0)).params
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    def fit(self, seed: int, *, on_step: OnStep = lambda step, metrics: None) -> Iterator[Row]:
        """Train from one seed and yield a row of metrics every `eval_every` steps and at the end.

        A row holds `step` (steps done), `epoch`, `train_loss`, `train_accuracy` and `gradient_norm`
        (means over the steps since the last row), `test_loss` and `test_accuracy` (the whole test
        set, after that step) and `steps_per_second` (without compilation and evaluation).

        Args:
          seed: decides parameters, dropout and the order of the batches.
          on_step: called after every step with the steps done and the step's metrics, which may
            still be under way on the device.

        Yields:
          The rows, as plain numbers.

        Raises:
          FloatingPointError: naming the first step whose loss or gradient was not finite.
        """
        config, train = self.config, self.dataset.train
        test = jax.device_put(evaluation_batches(self.dataset.test, batch_size=config.eval_batch_size))
        state = self.functions.init(jax.random.key(seed))
        window: list[Metrics] = []
        timed_steps, start = 0, time.perf_counter()
        for step in range(1, config.num_steps + 1):
            batch = batch_indices(step - 1, seed=seed, num_examples=len(train.labels), batch_size=config.batch_size)
            state, metrics = self.functions.train_step(state, train.images[batch], train.labels[batch])
            window.append(metrics)
            timed_steps += 1
            on_step(step, metrics)
            if step == 1:
                jax.block_until_ready(metrics)
                timed_steps, start = 0, time.perf_counter()
            if step % config.eval_every == 0 or step == config.num_steps:
                row = _window_means(window, step)
                seconds = time.perf_counter() - start
                row["epoch"] = step * config.batch_size / len(train.labels)
                row["steps_per_second"] = timed_steps / seconds
                row |= _test_metrics(self.functions.evaluate(state, test), step)
                yield row
                window, timed_steps, start = [], 0, time.perf_counter()


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
    row = {f"test_{name}": float(value) for name, value in jax.device_get(metrics).items()}
    if not np.isfinite(row["test_loss"]):
        raise FloatingPointError(
            f"Training stopped: after step {step} the test loss was {row['test_loss']}. "
            "Lower config.optimizer.learning_rate or lengthen its warmup_steps."
        )
    return row
