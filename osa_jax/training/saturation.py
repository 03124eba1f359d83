"""A warning for attention that trains no longer: the gradients of its projections have vanished."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from osa_jax.conditioning import vanished_gradients

STEPS = 10
"""Steps to judge by; some initialisations have no gradient of queries and keys at the first step or two."""


def vanished_projections(gradient: Any) -> jax.Array:
    """Which projections get no gradient, as one array.

    Args:
      gradient: a tree like the parameters.

    Returns:
      Booleans `[P]`, in the order of the names of `vanished_gradients`.

    Example:
      >>> vanished_projections({"value": {"kernel": jnp.ones((3, 2))}, "key": {"kernel": jnp.zeros((3, 2))}}).tolist()
      [True, False]
    """
    vanished = vanished_gradients(gradient)
    return jnp.array([vanished[name] for name in sorted(vanished)], bool)


class SaturationWatch:
    """Warns, once, of the projections without a gradient in more than half of at least `STEPS` steps.

    The steps only hand over arrays that may still be under way; a row reads them.

    Args:
      params: the parameters, or anything of their shapes.

    Example:
      >>> watch = SaturationWatch({"query": {"kernel": jnp.ones((3, 2))}})
      >>> for _ in range(10):
      ...     watch.on_step(jnp.array([True]))
      >>> with warnings.catch_warnings(record=True, action="always") as caught:
      ...     watch.on_row(10)
      >>> str(caught[0].message)
      'At most steps until step 10 no gradient reached query/kernel: ...'
    """

    def __init__(self, params: Any) -> None:
        self._names = np.array(sorted(jax.eval_shape(vanished_gradients, params)))
        self._steps: list[jax.Array] = []
        self._told = False

    def on_step(self, vanished: jax.Array) -> None:
        """Take note of what `vanished_projections` said of a step."""
        self._steps.append(vanished)

    def on_row(self, step: int) -> None:
        """Look at the steps since the last look, if they are enough, and warn.

        Args:
          step: steps done.
        """
        if len(self._steps) < STEPS:
            return
        vanished = np.mean(jax.device_get(self._steps), axis=0) > 0.5
        self._steps = []
        if vanished.any() and not self._told:
            self._told = True
            warnings.warn(
                f"At most steps until step {step} no gradient reached {', '.join(self._names[vanished])}: if softmax "
                "is saturated, lower what scales its scores, as config.model.spectral_conditioning.lam of query and "
                "key, or normalise queries and keys.",
                stacklevel=2,
            )
