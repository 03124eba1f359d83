"""Spectral conditioning of any Flax NNX module; `osa_jax.nn.linen` has the wrapper for Linen modules."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from flax import nnx
from flax.core import FrozenDict

from osa_jax.conditioning import ConditioningMethod, Layout, spectral_condition


class SpectralConditioned(nnx.Module):
    """A module that is called with `W + C` in place of its query, key and value kernels W.

    Trained and stored is W: the parameters are those of the module, under `spectrally_conditioned/`,
    and a gradient by them is that by `W + C`. A wrapped module inside the module is refused, and so is
    this one's state by `spectral_condition`: nothing is corrected twice. Other state (random streams,
    running means, caches) is the module's own, and changes as ever; only what a call adds to the module,
    as `sow` does, is lost.

    Args:
      module: any NNX module; it is not changed.
      method: see `osa_jax.spectral_condition`, like all that follows.
      lam: the factor lambda, or one for each projection.
      select: regular expressions that select the kernels.
      heads: the number of heads, for kernels that do not show it.
      layout: `head` or `fused`.

    Raises:
      ValueError: as `osa_jax.spectral_condition`, for the module's parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0))
      >>> conditioned = SpectralConditioned(layer, method="polar")
      >>> conditioned(jnp.ones((4, 16, 8))).shape
      (4, 16, 8)

    Saratchandran & Lucey (2026), section 3.3.
    """

    def __init__(
        self,
        module: nnx.Module,
        *,
        method: ConditioningMethod = "identity",
        lam: float | Mapping[str, float] = 1.0,
        select: str | Mapping[str, str] | None = None,
        heads: int | None = None,
        layout: Layout = "head",
    ) -> None:
        options: dict[str, Any] = {"method": method, "lam": lam, "select": select, "heads": heads, "layout": layout}
        # Hashable, as all that is static in a module has to be.
        self.options: FrozenDict[str, Any] = FrozenDict(options)
        self.spectrally_conditioned = module
        jax.eval_shape(partial(spectral_condition, **options), nnx.state(module, nnx.Param))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; arguments and result are its own."""
        graph, params, *rest = nnx.split(self.spectrally_conditioned, nnx.Param, ...)
        # The variables of `rest` are not copied: what the call changes, it changes in the module.
        module = nnx.merge(graph, spectral_condition(params, **self.options), *rest)
        return module(*args, **kwargs)
