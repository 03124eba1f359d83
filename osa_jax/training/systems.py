"""The systems of the paper's Figure 1: one vision transformer, told apart by its switches alone."""

from typing import Any, NamedTuple


class System(NamedTuple):
    """A system's name in tables and figures, and the switches of the model that make it."""

    label: str
    model: dict[str, Any]


_SOFTMAX = {
    "attention": "softmax",
    "method": "exact",
    "qk_features": None,
    "init": "standard",
    "activation_gain": 1.0,
}
_OSA = {
    "attention": "orthogonal",
    "skip": False,
    "norm": False,
    "init": "orthogonal",
    "activation_gain": 1.2,
}

SYSTEMS: dict[str, System] = {
    "vit": System("ViT", _SOFTMAX | {"skip": True, "norm": True}),
    "vit_no_skip": System("ViT, no skips", _SOFTMAX | {"skip": False, "norm": True}),
    "vit_no_skip_no_norm": System("ViT, no skips, no norm", _SOFTMAX | {"skip": False, "norm": False}),
    "osa": System("OSA, exact", _OSA | {"method": "exact"}),
    "osa_qr": System("OSA, QR", _OSA | {"method": "qr"}),
    "osa_newton_schulz": System("OSA, Newton-Schulz", _OSA | {"method": "newton_schulz"}),
}
