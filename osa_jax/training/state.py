"""The state of a run, and the pure steps that change and judge it.

Shapes: `B` images of one batch, `C` classes, `K` batches of an evaluation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from osa_jax.data import Batches
from osa_jax.data.augment import Augmentation
from osa_jax.linalg import at_least_float32
from osa_jax.training.saturation import vanished_projections

Array = jax.Array | np.ndarray
Metrics = dict[str, jax.Array]
CreateModel = Callable[..., nnx.Module]
Apply = Callable[..., tuple[jax.Array, nnx.State]]
BatchGradient = Callable[..., tuple[nnx.State, Any]]

RUN_KEY = 2**31
"""Folded into the seed's key for the run's; the model's own streams count from 0."""


class TrainState(NamedTuple):
    """Everything a run changes as it goes; whole, it continues the run bit for bit.

    `params`, the model's other state `rest` (counters, random streams), the optimiser's state,
    `ema` (the moving average of the parameters, or None), `step` (steps done, int32) and `key`
    (the run's typed random key, which never changes: a step's own keys are folded from it).
    """

    params: nnx.State
    rest: nnx.State
    opt_state: optax.OptState
    ema: nnx.State | None
    step: jax.Array
    key: jax.Array

    @property
    def judged(self) -> nnx.State:
        """The parameters to evaluate: the moving average where there is one."""
        return self.params if self.ema is None else self.ema


class TrainFunctions(NamedTuple):
    """The functions of one system; the steps are compiled once for every seed."""

    init: Callable[[jax.Array], TrainState]
    train_step: Callable[[TrainState, Array, Array], tuple[TrainState, Metrics]]
    evaluate: Callable[[TrainState, Batches], Metrics]
    predict: Callable[[TrainState, Array], jax.Array]
    model: Callable[[TrainState], nnx.Module]


def make_train_functions(
    create_model: CreateModel,
    optimizer: optax.GradientTransformation,
    *,
    ema_decay: float | None = None,
    accumulate_steps: int = 1,
    augment: Augmentation | None = None,
) -> TrainFunctions:
    """Split a model into its graph and its state, and build the functions on the latter.

    `init(key)` draws the parameters, `train_step(state, images, labels)` takes one optimiser step
    on the mean cross-entropy (it consumes its state), `evaluate(state, batches)` returns the
    weighted mean `loss` and `accuracy` over all batches with the `confusion` counts `[C, C]` (true
    class, predicted class), and `predict(state, images)` returns probabilities `[B, C]`. A train
    step's metrics are those of the batch before the update: `loss`, `accuracy`, `gradient_norm`
    (before clipping) and `vanished` (see `vanished_projections`). `model(state)` is the model itself,
    with the parameters that are judged.
    `init` is not jitted: with jaxlib 0.10.2 and few cores, independent LAPACK calls in one program
    can wait for each other for ever.

    Args:
      create_model: called as `create_model(rngs=nnx.Rngs(...))`; the model maps images
        `[B, H, W, channels]` to logits `[B, C]` and takes a keyword `deterministic`.
      optimizer: an optax transformation.
      ema_decay: with a number d, `ema <- d ema + (1 - d) params` after every step, which `evaluate`
        and `predict` use.
      accumulate_steps: number of equal parts of a batch that are gone through one after another, in
        less memory, for one step.
      augment: changes a step's images by `augment(key, images)`, with a new key every step.

    Returns:
      `TrainFunctions`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from flax import nnx
      >>> class Linear(nnx.Module):
      ...     def __init__(self, *, rngs):
      ...         self.out = nnx.Linear(4, 2, rngs=rngs)
      ...     def __call__(self, images, *, deterministic):
      ...         return self.out(images.reshape(len(images), -1))
      >>> functions = make_train_functions(Linear, optax.sgd(0.1))
      >>> images, labels = jnp.ones((3, 2, 2, 1)), jnp.zeros(3, jnp.int32)
      >>> state, metrics = functions.train_step(functions.init(jax.random.key(0)), images, labels)
      >>> sorted(metrics), int(state.step)
      (['accuracy', 'gradient_norm', 'loss', 'vanished'], 1)
    """
    graph = nnx.graphdef(nnx.eval_shape(lambda: create_model(rngs=nnx.Rngs(0))))

    def apply(params: nnx.State, rest: nnx.State, images: Array, *, deterministic: bool) -> tuple[jax.Array, nnx.State]:
        model = nnx.merge(graph, params, rest, copy=True)
        logits = model(images, deterministic=deterministic)
        return logits, nnx.state(model, nnx.Not(nnx.Param))

    def init(key: jax.Array) -> TrainState:
        model = create_model(rngs=nnx.Rngs(key))
        params, rest = nnx.state(model, nnx.Param, ...)
        ema = None if ema_decay is None else jax.tree.map(jnp.copy, params)
        run_key = jax.random.fold_in(key, RUN_KEY)
        return TrainState(params, rest, optimizer.init(params), ema, jnp.zeros((), jnp.int32), run_key)

    def model_of(state: TrainState) -> nnx.Module:
        return nnx.merge(graph, state.judged, state.rest, copy=True)

    def train_step(state: TrainState, images: Array, labels: Array) -> tuple[TrainState, Metrics]:
        if augment is not None:
            images = augment(jax.random.fold_in(state.key, state.step), jnp.asarray(images))
        gradient_of: BatchGradient = partial(_batch_gradient, apply, state.params)
        if accumulate_steps > 1:
            gradient_of = _accumulated(gradient_of, accumulate_steps)
        rest, (gradient, metrics) = gradient_of(state.rest, images, labels)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = None if ema_decay is None else optax.incremental_update(params, state.ema, 1 - ema_decay)
        metrics["gradient_norm"] = optax.tree.norm(gradient)
        metrics["vanished"] = vanished_projections(gradient)
        return TrainState(params, rest, opt_state, ema, state.step + 1, state.key), metrics

    return TrainFunctions(
        init,
        jax.jit(train_step, donate_argnums=0),
        jax.jit(partial(_evaluate, apply)),
        jax.jit(partial(_predict, apply)),
        model_of,
    )


def _batch_gradient(
    apply: Apply, params: nnx.State, rest: nnx.State, images: Array, labels: Array
) -> tuple[nnx.State, tuple[nnx.State, Metrics]]:
    """The model's other state after a batch, and the batch's gradient and metrics."""

    def loss_of(params: nnx.State) -> tuple[jax.Array, tuple[Metrics, nnx.State]]:
        logits, after = apply(params, rest, images, deterministic=False)
        losses, hits = judge(logits, labels)
        loss = jnp.mean(losses)
        return loss, ({"loss": loss, "accuracy": jnp.mean(hits)}, after)

    gradient, (metrics, after) = jax.grad(loss_of, has_aux=True)(params)
    return after, (gradient, metrics)


def _accumulated(gradient_of: BatchGradient, parts: int) -> BatchGradient:
    """The same means over a whole batch, from one equal part of it after another."""

    def accumulate(rest: nnx.State, *batch: Array) -> tuple[nnx.State, Any]:
        split = jax.tree.map(lambda array: array.reshape(parts, -1, *array.shape[1:]), batch)

        def add(carry: tuple[nnx.State, Any], part: tuple[Array, ...]) -> tuple[tuple[nnx.State, Any], None]:
            rest, total = carry
            rest, values = gradient_of(rest, *part)
            return (rest, jax.tree.map(jnp.add, total, values)), None

        _, values = jax.eval_shape(gradient_of, rest, *jax.tree.map(lambda array: array[0], split))
        zeros = jax.tree.map(jnp.zeros_like, values)
        (rest, total), _ = jax.lax.scan(add, (rest, zeros), split)
        return rest, jax.tree.map(lambda value: value / parts, total)

    return accumulate


def _evaluate(apply: Apply, state: TrainState, batches: Batches) -> Metrics:
    def totals(batch: Batches) -> Metrics:
        logits, _ = apply(state.judged, state.rest, batch.images, deterministic=True)
        losses, hits = judge(logits, batch.labels)
        weights, classes = batch.weights, logits.shape[-1]
        pairs = batch.labels * classes + jnp.argmax(logits, axis=-1)
        return {
            "loss": jnp.sum(jnp.where(weights > 0, weights * losses, 0)),
            "accuracy": jnp.sum(weights * hits),
            "confusion": jnp.bincount(pairs, weights, length=classes**2).reshape(classes, classes),
            "weight": jnp.sum(weights),
        }

    sums = jax.tree.map(lambda parts: jnp.sum(parts, axis=0), jax.lax.map(totals, batches))
    weight = sums.pop("weight")
    return sums | {name: sums[name] / weight for name in ("loss", "accuracy")}


def _predict(apply: Apply, state: TrainState, images: Array) -> jax.Array:
    logits, _ = apply(state.judged, state.rest, images, deterministic=True)
    return jax.nn.softmax(_at_least_float32(logits))


def judge(logits: jax.Array, labels: Array) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy and correctness of every example, in float32 at least.

    `loss_b = logsumexp(z_b) - z_b[y_b]`, `hit_b = 1` where `argmax z_b = y_b`.

    Args:
      logits: `[B, C]`.
      labels: `[B]` integers in `[0, C)`.

    Returns:
      Losses `[B]` and hits `[B]`.

    Example:
      >>> import jax.numpy as jnp
      >>> losses, hits = judge(jnp.zeros((2, 4)), jnp.array([0, 3]))
      >>> [round(float(loss), 4) for loss in losses], hits.tolist()
      ([1.3863, 1.3863], [1.0, 0.0])
    """
    logits = _at_least_float32(logits)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    hits = (jnp.argmax(logits, axis=-1) == labels).astype(logits.dtype)
    return losses, hits


def _at_least_float32(logits: jax.Array) -> jax.Array:
    return logits.astype(at_least_float32(logits.dtype))
