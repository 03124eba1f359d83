"""The state of a run, the pure steps that change and judge it, and their optimiser.

Shapes: `B` images of one batch, `C` classes, `K` batches of an evaluation.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from osa_jax.data import Batches
from osa_jax.linalg import at_least_float32

Array = jax.Array | np.ndarray
Metrics = dict[str, jax.Array]
CreateModel = Callable[..., nnx.Module]


class TrainState(NamedTuple):
    """Everything a step changes: parameters, the model's other state, the optimiser's state."""

    params: nnx.State
    rest: nnx.State
    opt_state: optax.OptState


class TrainFunctions(NamedTuple):
    """The jitted functions of one system, compiled once for every seed."""

    init: Callable[[jax.Array], TrainState]
    train_step: Callable[[TrainState, Array, Array], tuple[TrainState, Metrics]]
    evaluate: Callable[[TrainState, Batches], Metrics]


def make_optimizer(
    *,
    num_steps: int,
    learning_rate: float,
    warmup_steps: int,
    weight_decay: float = 0.0,
    clip_norm: float = 1.0,
) -> optax.GradientTransformation:
    """AdamW with a linear warm-up, cosine decay to zero and clipping of the global norm.

    Weight decay acts on arrays of two or more axes: never on biases, norms or attention scales.

    Args:
      num_steps: length of the whole run.
      learning_rate: the schedule's peak, reached after the warm-up.
      warmup_steps: steps of the linear warm-up, below `num_steps`.
      weight_decay: AdamW's decoupled weight decay.
      clip_norm: the largest global norm of a gradient.

    Returns:
      An optax transformation.

    Raises:
      ValueError: if a number is out of range.

    Example:
      >>> optimizer = make_optimizer(num_steps=10, learning_rate=1e-3, warmup_steps=2)
      >>> sorted(optimizer._fields)
      ['init', 'update']
    """
    if not 0 <= warmup_steps < num_steps:
        raise ValueError(
            f"warmup_steps must lie in [0, num_steps), got {warmup_steps} with "
            f"num_steps={num_steps}: lengthen the run or shorten the warm-up."
        )
    for name, value, valid in (
        ("learning_rate", learning_rate, 0 < learning_rate < float("inf")),
        ("weight_decay", weight_decay, 0 <= weight_decay < float("inf")),
        ("clip_norm", clip_norm, clip_norm > 0),
    ):
        if not valid:
            raise ValueError(f"{name} must be a positive finite number, got {value}.")
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, num_steps)
    decayed = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(schedule, weight_decay=weight_decay, mask=decayed),
    )


def make_train_functions(create_model: CreateModel, optimizer: optax.GradientTransformation) -> TrainFunctions:
    """Split a model into its graph and its state, and build the jitted functions on the latter.

    `init(key)` draws the parameters, `train_step(state, images, labels)` takes one optimiser step
    on the mean cross-entropy (it consumes its state), and `evaluate(state, batches)` returns the
    weighted mean `loss` and `accuracy` over all batches. A train step's metrics are those of the
    batch before the update: `loss`, `accuracy` and `gradient_norm` (before clipping). `init` is
    not jitted: with jaxlib 0.10.2 and few cores, independent LAPACK calls in one program can wait
    for each other for ever.

    Args:
      create_model: called as `create_model(rngs=nnx.Rngs(...))`; the model maps images
        `[B, H, W, channels]` to logits `[B, C]` and takes a keyword `deterministic`.
      optimizer: an optax transformation.

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
      >>> sorted(metrics)
      ['accuracy', 'gradient_norm', 'loss']
    """
    graph = nnx.graphdef(nnx.eval_shape(lambda: create_model(rngs=nnx.Rngs(0))))

    def apply(params: nnx.State, rest: nnx.State, images: Array, *, deterministic: bool) -> tuple[jax.Array, nnx.State]:
        model = nnx.merge(graph, params, rest, copy=True)
        logits = model(images, deterministic=deterministic)
        return logits, nnx.state(model, nnx.Not(nnx.Param))

    def init(key: jax.Array) -> TrainState:
        model = create_model(rngs=nnx.Rngs(key))
        params, rest = nnx.state(model, nnx.Param, ...)
        return TrainState(params, rest, optimizer.init(params))

    def train_step(state: TrainState, images: Array, labels: Array) -> tuple[TrainState, Metrics]:
        def loss_of(params: nnx.State) -> tuple[jax.Array, tuple[jax.Array, nnx.State]]:
            logits, rest = apply(params, state.rest, images, deterministic=False)
            losses, hits = judge(logits, labels)
            return jnp.mean(losses), (jnp.mean(hits), rest)

        (loss, (accuracy, rest)), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        norm = optax.tree.norm(gradient)
        metrics = {"loss": loss, "accuracy": accuracy, "gradient_norm": norm}
        return TrainState(params, rest, opt_state), metrics

    def evaluate(state: TrainState, batches: Batches) -> Metrics:
        def totals(batch: Batches) -> Metrics:
            logits, _ = apply(state.params, state.rest, batch.images, deterministic=True)
            losses, hits = judge(logits, batch.labels)
            weights = batch.weights
            return {
                "loss": jnp.sum(jnp.where(weights > 0, weights * losses, 0)),
                "accuracy": jnp.sum(weights * hits),
                "weight": jnp.sum(weights),
            }

        sums = jax.tree.map(jnp.sum, jax.lax.map(totals, batches))
        weight = sums.pop("weight")
        return {name: total / weight for name, total in sums.items()}

    return TrainFunctions(init, jax.jit(train_step, donate_argnums=0), jax.jit(evaluate))


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
    logits = logits.astype(at_least_float32(logits.dtype))
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    hits = (jnp.argmax(logits, axis=-1) == labels).astype(logits.dtype)
    return losses, hits
