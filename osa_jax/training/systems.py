"""What is compared: one vision transformer, told apart by its switches alone."""

from typing import Any, NamedTuple


class System(NamedTuple):
    """A system's name in tables and figures, and the switches of the model that make it."""

    label: str
    model: dict[str, Any]


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
    "activation_gain": 1.2,
    "activation_shaping": "none",
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
