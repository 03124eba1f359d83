"""Checks a config against the functions that its sections call, before anything is compiled."""

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict, FrozenConfigDict

from osa_jax.data import SOURCES, make_augmentation
from osa_jax.models import MODELS
from osa_jax.nn import SpectralConditioned
from osa_jax.training.optimizers import make_optimizer


def run_settings(
    *,
    seed: int,
    num_steps: int | None = None,
    epochs: float | None = None,
    batch_size: int,
    eval_batch_size: int,
    eval_every: int,
    accumulate_steps: int = 1,
    ema_decay: float | None = None,
    tensorboard: bool = False,
    data: Mapping,
    model: Mapping,
    optimizer: Mapping,
    augment: Mapping | None = None,
    checkpoint: Mapping | None = None,
) -> None:
    """The keys of a config and their types.

    Args:
      seed: decides parameters, dropout and the order of the batches.
      num_steps: optimiser steps of the run.
      epochs: the same as passes over the training images; one of the two is given.
      batch_size: examples of a step.
      eval_batch_size: examples evaluated at once; the metrics do not depend on it.
      eval_every: steps between two rows of metrics.
      accumulate_steps: equal parts of a batch that are computed one after another, in less memory.
      ema_decay: decay of the moving average of the parameters that is evaluated, or None.
      tensorboard: whether rows are written for TensorBoard too.
      data: `name`, a key of `SOURCES`, and that source's keyword arguments.
      model: `name`, a key of `MODELS`, and that model's keyword arguments; image shape, classes
        and random streams come from the data and the seed. A section `spectral_conditioning` in it
        holds keyword arguments of `SpectralConditioned`, in which the model is wrapped unless it is empty.
      optimizer: keyword arguments of `make_optimizer`.
      augment: keyword arguments of `make_augmentation`, apart from `fill`; training images alone are
        changed.
      checkpoint: keyword arguments of `checkpoint_settings`, all of which have defaults.

    Raises:
      ValueError: if a number is out of range, or both or neither of `num_steps` and `epochs` are
        given.
    """
    if (num_steps is None) == (epochs is None):
        given = "both" if epochs is not None else "neither"
        raise ValueError(f"One of config.num_steps and config.epochs must be given, got {given}.")
    counts = {
        "num_steps": num_steps,
        "batch_size": batch_size,
        "eval_batch_size": eval_batch_size,
        "eval_every": eval_every,
        "accumulate_steps": accumulate_steps,
    }
    _check_counts("config", counts)
    if epochs is not None and not 0 < epochs < float("inf"):
        raise ValueError(f"config.epochs must be a positive finite number, got {epochs}.")
    if batch_size % accumulate_steps:
        raise ValueError(
            f"config.accumulate_steps must divide batch_size, got {accumulate_steps} and {batch_size}: "
            "the parts of a batch are equal."
        )
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise ValueError(f"config.ema_decay must lie in [0, 1), got {ema_decay}; leave it out for no average.")
    if seed < 0:
        raise ValueError(f"config.seed must not be negative, got {seed}.")


def checkpoint_settings(*, every: int = 500, keep: int = 2) -> None:
    """The keys of a config's section `checkpoint`.

    A run is also saved at its end and when it is told to stop. The best checkpoint, kept besides the
    newest, is the saved one with the highest test accuracy of its own step's row: make `every` a
    multiple of `eval_every`.

    Args:
      every: steps between two checkpoints.
      keep: the number of newest checkpoints to keep.

    Raises:
      ValueError: if a number is below 1.
    """
    _check_counts("config.checkpoint", {"every": every, "keep": keep})


def check_config(config: ConfigDict) -> FrozenConfigDict:
    """Check every key and type of a config, and return it frozen.

    Args:
      config: a config with the keys of `run_settings`.

    Returns:
      The same values and the defaults of the optional keys of `run_settings` and
      `checkpoint_settings`; nothing can change them any more.

    Raises:
      ValueError: naming the key that is unknown (with the nearest valid one), missing, or of the
        wrong type.

    Example:
      >>> from ml_collections import ConfigDict
      >>> check_config(ConfigDict({"sead": 0}))
      Traceback (most recent call last):
      ValueError: config.sead is not a known key; did you mean 'seed'?
    """
    values = config.to_dict()
    _check_arguments("config", values, run_settings)
    run_settings(**values)
    _check_section("data", values, SOURCES)
    model = dict(values["model"])
    conditioning = model.pop("spectral_conditioning", None)
    _check_section("model", values | {"model": model}, MODELS, supplied=("image_shape", "num_classes", "rngs"))
    _check_arguments(
        "config.model.spectral_conditioning", conditioning or {}, SpectralConditioned, supplied=("module",)
    )
    _check_arguments("config.optimizer", values["optimizer"], make_optimizer, supplied=("num_steps",))
    _check_arguments("config.augment", values.get("augment") or {}, make_augmentation, supplied=("fill",))
    checkpoint = values.get("checkpoint") or {}
    _check_arguments("config.checkpoint", checkpoint, checkpoint_settings)
    checkpoint_settings(**checkpoint)
    values["checkpoint"] = _defaults(checkpoint_settings) | checkpoint
    return FrozenConfigDict(_defaults(run_settings) | values)


def changed(config: ConfigDict, changes: Mapping[str, Any]) -> ConfigDict:
    """A copy of a config with other values, which may be of other types, and with new keys.

    Args:
      config: stays as it is.
      changes: nested like the config.

    Returns:
      The copy, not locked.

    Example:
      >>> from ml_collections import ConfigDict
      >>> changed(ConfigDict({"a": 1, "b": {"c": 2}}), {"b": {"c": "x", "d": 3}}).to_dict()
      {'a': 1, 'b': {'c': 'x', 'd': 3}}
    """
    copy = ConfigDict(config.to_dict())
    with copy.ignore_type():
        copy.update(changes)
    return copy


def nearest(key: str, names: Iterable[str]) -> str:
    """The end of an error's line that helps with a misspelt name.

    Args:
      key: what was written.
      names: what might have been meant.

    Returns:
      The nearest of the names as a question, or all of them.

    Example:
      >>> nearest("widht", ["width", "depth"]), nearest("zzz", ["width", "depth"])
      ("did you mean 'width'?", "the keys are ['depth', 'width'].")
    """
    names = sorted(names)
    close = difflib.get_close_matches(key, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"the keys are {names}."


def _check_counts(path: str, counts: Mapping[str, int | None]) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{path}.{name} must be at least 1, got {value}.")


def _check_section(
    section: str,
    config: Mapping[str, Any],
    choices: Mapping[str, Callable],
    supplied: tuple[str, ...] = (),
) -> None:
    """Check a section whose `name` picks a function and whose other keys are its arguments."""
    values = dict(config[section])
    name = values.pop("name", None)
    if name not in choices:
        raise ValueError(f"config.{section}.name must be one of {sorted(choices)}, got {name!r}.")
    _check_arguments(f"config.{section}", values, choices[name], supplied)


def _check_arguments(path: str, values: Mapping[str, Any], function: Callable, supplied: tuple[str, ...] = ()) -> None:
    """Check that `values` are keyword arguments of `function`, apart from those `supplied`."""
    if inspect.isclass(function):
        function = function.__init__
        supplied += ("self",)
    hints = typing.get_type_hints(function)
    parameters = {
        name: parameter for name, parameter in inspect.signature(function).parameters.items() if name not in supplied
    }
    for key, value in values.items():
        if key not in parameters:
            raise ValueError(f"{path}.{key} is not a known key; {nearest(key, parameters)}")
        if not _has_type(value, hints[key]):
            raise ValueError(f"{path}.{key} must be of type {_type_name(hints[key])}, got {value!r}.")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in values:
            raise ValueError(f"{path}.{name} is missing; add it to the config.")


def _defaults(function: Callable) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {
        name: parameter.default for name, parameter in parameters.items() if parameter.default is not parameter.empty
    }


def _has_type(value: Any, hint: Any) -> bool:
    """Whether a config's value fits an annotation; hints beyond plain ones are left to the callee.

    Choices (`Literal`) are compared by type alone: the callee names the valid ones. What may be a
    dtype has to be the name of a floating one, which JSON can hold.
    """
    options = typing.get_args(hint)
    if np.dtype in options:
        return (value is None and type(None) in options) or _names_floating_dtype(value)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_has_type(value, option) for option in options)
    if typing.get_origin(hint) is Mapping:
        return isinstance(value, Mapping)
    if typing.get_origin(hint) is typing.Literal:
        return any(type(value) is type(choice) for choice in options)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    if hint in (bool, str, type(None), Mapping):
        return isinstance(value, hint)
    return True


def _names_floating_dtype(value: Any) -> bool:
    try:
        return isinstance(value, str) and jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except TypeError:
        return False


def _type_name(hint: Any) -> str:
    if np.dtype in typing.get_args(hint):
        return "floating dtype, as 'float32' or 'bfloat16'"
    return getattr(hint, "__name__", str(hint).removesuffix(" | None")).replace("typing.", "")
