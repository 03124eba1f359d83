"""What is compared: one vision transformer, told apart by its switches alone."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from osa_jax.training.config import changed


class System(NamedTuple):
    """A system's name in tables and figures, and the switches of the model that make it.

    `optimizer` is what the switches ask of it: without skips the blocks learn more slowly.
    """

    label: str
    model: dict[str, Any]

    @property
    def optimizer(self) -> dict[str, float]:
        """Changes of the optimiser."""
        return {"block_learning_rate_factor": 1.0 if self.model["skip"] else 1 / 3}


_SOFTMAX = {
    "attention": "softmax",
    "method": "exact",
    "qk_features": None,
    "skip": True,
    "norm": True,
    "init": "standard",
    "activation_gain": 1.0,
    "activation_shaping": "none",
}
_OSA = {
    "attention": "orthogonal",
    "skip": False,
    "norm": False,
    "init": "orthogonal",
    "activation_gain": 1.0,
    "activation_shaping": "dks",
}
# Their papers' setting without skips and norms: orthogonal weights and an activation shaped for the
# depth, DKS in He et al. (2023), a nearly linear one in Noci et al. (2023).
_VANILLA = _SOFTMAX | {"skip": False, "norm": False, "init": "orthogonal", "activation_shaping": "dks"}

SYSTEMS: dict[str, System] = {
    "vit": System("ViT", _SOFTMAX),
    "vit_no_skip": System("ViT, no skips", _SOFTMAX | {"skip": False}),
    "vit_no_skip_no_norm": System("ViT, no skips, no norm", _SOFTMAX | {"skip": False, "norm": False}),
    "osa": System("OSA, exact", _OSA | {"method": "exact"}),
    "osa_qr": System("OSA, QR", _OSA | {"method": "qr"}),
    "osa_newton_schulz": System("OSA, Newton-Schulz", _OSA | {"method": "newton_schulz"}),
    "value_skipinit": System("Value-SkipInit", _VANILLA | {"attention": "value_skipinit"}),
    "shaped": System("Shaped attention", _VANILLA | {"attention": "shaped", "activation_shaping": "tat"}),
    "e_spa": System("E-SPA", _VANILLA | {"attention": "e_spa"}),
    "cutting_the_skip": System("Cutting the Skip", _SOFTMAX | {"skip": False, "init": "cutting_the_skip"}),
    "ns_attention": System("NS-Attention", _SOFTMAX | {"attention": "ns_attention"}),
}

# The systems of the paper's own experiment, a name each.
FIGURE_1 = ("vit", "vit_no_skip", "vit_no_skip_no_norm", "osa", "osa_qr", "osa_newton_schulz")


class Variant(NamedTuple):
    """One line of a comparison: its name in tables and figures, and what is trained."""

    label: str
    config: ConfigDict


def system_variant(config: ConfigDict, name: str) -> Variant:
    """The same config with the switches of one system.

    Args:
      config: with sections `model` and `optimizer`; stays as it is.
      name: a key of `SYSTEMS`.

    Returns:
      The system's label and config; its switches win over values of the same keys.

    Raises:
      ValueError: if there is no such system.

    Example:
      >>> variant = system_variant(ConfigDict({"model": {"depth": 6}, "optimizer": {"name": "muon"}}), "osa")
      >>> variant.label, variant.config.model.depth, variant.config.model.skip, variant.config.optimizer.name
      ('OSA, exact', 6, False, 'muon')
    """
    if name not in SYSTEMS:
        raise ValueError(f"The system must be one of {sorted(SYSTEMS)}, got {name!r}.")
    system = SYSTEMS[name]
    return Variant(system.label, changed(config, {"model": system.model, "optimizer": system.optimizer}))


def system_of(model: Mapping[str, Any]) -> str | None:
    """The name of the system whose switches a model has.

    Args:
      model: the section `model` of a config.

    Returns:
      A key of `SYSTEMS`, or None if the switches are those of none.

    Example:
      >>> system_of({"depth": 6, **SYSTEMS["osa"].model}), system_of({"depth": 6})
      ('osa', None)
    """
    switches = dict(model).items()
    return next((name for name, system in SYSTEMS.items() if system.model.items() <= switches), None)
