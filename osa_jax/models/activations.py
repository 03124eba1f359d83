"""Activations by name, and the gain that keeps their mean square.

Without skips and norms nothing restores a signal's scale, so an activation that loses some of it at
every layer makes a deep network silent.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


def preserving_gain(activation: str) -> float:
    """The gain that keeps the mean square of a standard normal input.

    `1 / sqrt(E f(z)^2)` for `z ~ N(0, 1)`, by the trapezoidal rule.

    Args:
      activation: a name in `ACTIVATIONS`.

    Returns:
      The gain.

    Raises:
      ValueError: an unknown name.

    Example:
      >>> round(preserving_gain("relu") ** 2, 4)
      2.0

    Martens et al. (2021), section 5; Zhang & Martens (2026), section 4.4.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {activation!r}.")
    z = np.linspace(-12.0, 12.0, 24_001)
    density = np.exp(-(z**2) / 2)
    with jax.ensure_compile_time_eval():
        values = np.asarray(ACTIVATIONS[activation](jnp.asarray(z)), np.float64)
    return float(np.sqrt(density.sum() / (values**2 * density).sum()))


def resolve_gain(gain: float | Literal["preserve"], activation: str) -> float:
    """A gain given as a number, or as "preserve" for the one that keeps the mean square."""
    if gain == "preserve":
        return preserving_gain(activation)
    if isinstance(gain, str) or not np.isfinite(gain):
        raise ValueError(f"activation_gain must be a finite number or 'preserve', got {gain!r}.")
    return float(gain)
