"""Optimisers and learning-rate schedules by name."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import optax

Optimizer = Literal["adamw", "muon", "lion"]
Schedule = Literal["cosine", "linear", "wsd"]

MUON_RMS = 0.2
"""Root mean square of a Muon update over its learning rate: about AdamW's, so rates carry over."""


def make_schedule(
    schedule: Schedule,
    *,
    num_steps: int,
    learning_rate: float,
    warmup_steps: int,
    decay_fraction: float = 0.2,
) -> optax.Schedule:
    """A linear warm-up from 0 to the peak, then a way down to 0 at the run's end.

    With `p` the share of the steps after the warm-up that are done: `cosine` is
    `peak (1 + cos(pi p)) / 2`, `linear` is `peak (1 - p)`, and `wsd` (warm-up, stable, decay) stays at
    the peak until the last `decay_fraction` of all steps, which are linear.

    Args:
      schedule: `cosine`, `linear` or `wsd`.
      num_steps: length of the whole run.
      learning_rate: the peak, reached after the warm-up.
      warmup_steps: steps of the warm-up, below `num_steps`.
      decay_fraction: the share of `num_steps` in which `wsd` decays, in (0, 1].

    Returns:
      The learning rate as a function of the steps done.

    Raises:
      ValueError: an unknown schedule, or numbers out of range.

    Example:
      >>> rate = make_schedule("wsd", num_steps=10, learning_rate=1.0, warmup_steps=2, decay_fraction=0.4)
      >>> [round(float(rate(step)), 2) for step in (0, 1, 2, 6, 7, 8, 10)]
      [0.0, 0.5, 1.0, 1.0, 0.75, 0.5, 0.0]
    """
    _check_choice("schedule", schedule, get_args(Schedule))
    if not 0 <= warmup_steps < num_steps:
        raise ValueError(
            f"warmup_steps must lie in [0, num_steps), got {warmup_steps} with "
            f"num_steps={num_steps}: lengthen the run or shorten the warm-up."
        )
    if not 0 < decay_fraction <= 1:
        raise ValueError(f"decay_fraction must lie in (0, 1], got {decay_fraction}.")
    after = num_steps - warmup_steps
    decay = min(after, max(1, round(decay_fraction * num_steps)))
    descent = {
        "cosine": optax.cosine_decay_schedule(learning_rate, after),
        "linear": optax.linear_schedule(learning_rate, 0.0, after),
        "wsd": optax.linear_schedule(learning_rate, 0.0, decay, transition_begin=after - decay),
    }
    warmup = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules([warmup, descent[schedule]], [warmup_steps])


def make_optimizer(
    *,
    num_steps: int,
    learning_rate: float,
    warmup_steps: int,
    name: Optimizer = "adamw",
    schedule: Schedule = "cosine",
    decay_fraction: float = 0.2,
    weight_decay: float = 0.0,
    clip_norm: float = 1.0,
    alpha_learning_rate_factor: float = 1.0,
    block_learning_rate_factor: float = 1.0,
) -> optax.GradientTransformation:
    """An optimiser with a schedule, clipping of the global norm and decoupled weight decay.

    `muon` takes orthogonalised momentum for every kernel, with its axes merged into inputs and
    outputs, scaled so that AdamW's learning rates carry over; what is no kernel goes to Adam with
    Nesterov's momentum. Weight decay acts on kernels alone: never on biases, norms, positions or the
    scales of attention.

    Args:
      num_steps: length of the whole run.
      learning_rate: the schedule's peak, reached after the warm-up.
      warmup_steps: steps of the linear warm-up, below `num_steps`.
      name: `adamw`, `muon` or `lion`.
      schedule: see `make_schedule`.
      decay_fraction: see `make_schedule`.
      weight_decay: decoupled weight decay, times the learning rate.
      clip_norm: the largest global norm of a gradient.
      alpha_learning_rate_factor: factor on the learning rate of parameters named `alpha`, the
        scales of attention; 0 keeps them where they start.
      block_learning_rate_factor: factor on the learning rate of everything in `blocks`. Blocks
        without skips are a product, in which the relative changes of all of them add up.

    Returns:
      An optax transformation.

    Raises:
      ValueError: an unknown choice, or a number out of range.

    Example:
      >>> optimizer = make_optimizer(num_steps=10, learning_rate=1e-3, warmup_steps=2)
      >>> sorted(optimizer._fields)
      ['init', 'update']
    """
    _check_choice("name", name, get_args(Optimizer))
    limit = float("inf")
    for key, value, valid in (
        ("learning_rate", learning_rate, 0 < learning_rate < limit),
        ("clip_norm", clip_norm, 0 < clip_norm),
        ("weight_decay", weight_decay, 0 <= weight_decay < limit),
        ("alpha_learning_rate_factor", alpha_learning_rate_factor, 0 <= alpha_learning_rate_factor < limit),
        ("block_learning_rate_factor", block_learning_rate_factor, 0 <= block_learning_rate_factor < limit),
    ):
        if not valid:
            least = "positive" if key in ("learning_rate", "clip_norm") else "not negative"
            raise ValueError(f"{key} must be finite and {least}, got {value}.")
    rate = make_schedule(
        schedule,
        num_steps=num_steps,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        decay_fraction=decay_fraction,
    )
    if name == "muon":
        rule = optax.contrib.muon(
            rate, weight_decay=weight_decay, muon_weight_dimension_numbers=_matrix_axes, consistent_rms=MUON_RMS
        )
    else:
        rule = getattr(optax, name)(rate, weight_decay=weight_decay, mask=_named("kernel"))
    alphas = optax.masked(optax.scale(alpha_learning_rate_factor), _named("alpha"))
    blocks = optax.masked(optax.scale(block_learning_rate_factor), _named("blocks"))
    return optax.chain(optax.clip_by_global_norm(clip_norm), rule, alphas, blocks)


def _named(name: str) -> Callable[[Any], Any]:
    """Which parameters have this name in their path."""
    return lambda params: jax.tree.map_with_path(lambda path, _: name in _names(path), params)


def _matrix_axes(params: Any) -> Any:
    """Which axes of a kernel are its inputs and outputs; `None` for what is no kernel.

    A layer named `out` joins the heads, all axes but the last are its inputs; in every other kernel
    it is the first alone.
    """

    def axes(path: tuple, leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        names = _names(path)
        if "kernel" not in names or leaf.ndim < 2:
            return None
        split = leaf.ndim - 1 if "out" in names else 1
        return optax.contrib.MuonDimensionNumbers(tuple(range(split)), tuple(range(split, leaf.ndim)))

    return jax.tree.map_with_path(axes, params)


def _names(path: tuple) -> list[Any]:
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]


def _check_choice(name: str, choice: str, allowed: tuple[str, ...]) -> None:
    if choice not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {choice!r}.")
