"""Checks a config against the functions that its sections call, before anything is compiled."""

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict, FrozenConfigDict

from osa_jax.data import SOURCES
from osa_jax.models import MODELS
from osa_jax.training.state import make_optimizer


def run_settings(
    *,
    seed: int,
    num_steps: int,
    batch_size: int,
    eval_batch_size: int,
    eval_every: int,
    data: Mapping,
    model: Mapping,
    optimizer: Mapping,
) -> None:
    """The keys of a config and their types.

    Args:
      seed: decides parameters, dropout and the order of the batches.
      num_steps: optimiser steps of the run.
      batch_size: examples of a step.
      eval_batch_size: examples evaluated at once; the metrics do not depend on it.
      eval_every: steps between two rows of metrics.
      data: `name`, a key of `SOURCES`, and that source's keyword arguments.
      model: `name`, a key of `MODELS`, and that model's keyword arguments; image shape, classes
        and random streams come from the data and the seed.
      optimizer: keyword arguments of `make_optimizer`.

    Raises:
      ValueError: if a count is below 1, or the seed is negative.
    """
    counts = {
        "num_steps": num_steps,
        "batch_size": batch_size,
        "eval_batch_size": eval_batch_size,
        "eval_every": eval_every,
    }
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"config.{name} must be at least 1, got {value}.")
    if seed < 0:
        raise ValueError(f"config.seed must not be negative, got {seed}.")


def check_config(config: ConfigDict) -> FrozenConfigDict:
    """Check every key and type of a config, and return it frozen.

    Args:
      config: a config with the keys of `run_settings`.

    Returns:
      The same values, which nothing can change any more.

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
    _check_section("model", values, MODELS, supplied=("image_shape", "num_classes", "rngs"))
    _check_arguments("config.optimizer", values["optimizer"], make_optimizer, supplied=("num_steps",))
    return FrozenConfigDict(values)


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
            raise ValueError(f"{path}.{key} is not a known key; {_nearest(key, parameters)}")
        if not _has_type(value, hints[key]):
            expected = getattr(hints[key], "__name__", str(hints[key])).replace("typing.", "")
            raise ValueError(f"{path}.{key} must be of type {expected}, got {value!r}.")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in values:
            raise ValueError(f"{path}.{name} is missing; add it to the config.")


def _nearest(key: str, names: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"the keys are {sorted(names)}."


def _has_type(value: Any, hint: Any) -> bool:
    """Whether a config's value fits an annotation; hints beyond plain ones are left to the callee.

    Choices (`Literal`) are compared by type alone: the callee names the valid ones.
    """
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_has_type(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return any(type(value) is type(choice) for choice in typing.get_args(hint))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    if hint in (bool, str, type(None), Mapping):
        return isinstance(value, hint)
    return True
