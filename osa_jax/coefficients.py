"""Coefficients of Newton-Schulz iterations, by name. Every set here converges to singular values of 1.

A step (a, b, c) maps each singular value to ``a s + b s^3 + c s^5``. "cubic" is the paper's (Zhang &
Martens 2026, section 4), "polar_express" a table for singular values in [1e-3, 1] (Amsel, Persson,
Musco & Gower, "The Polar Express", 2025), followed by a step that converges with order three.
"""

import operator
from typing import Literal, NamedTuple

Coefficients = Literal["cubic", "polar_express"]
Step = tuple[float, float, float]
Steps = tuple[Step, ...]


class _Set(NamedTuple):
    """The steps (a, b, c) of an iteration: `head`, then `tail` for ever; and the default K."""

    head: Steps
    tail: Step
    num_iters: int


_SETS = {
    "cubic": _Set(head=(), tail=(1.5, -0.5, 0.0), num_iters=21),
    "polar_express": _Set(
        head=(
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115952949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787402, -1.267995827194594, 0.3768040894852514),
        ),
        tail=(1.875, -1.25, 0.375),
        num_iters=8,
    ),
}


def iteration_steps(num_iters: int | None, coefficients: str | None) -> Steps:
    """The steps of a set, as many as asked for.

    Args:
      num_iters: the number of steps, by default the set's own.
      coefficients: the set's name, by default "polar_express".

    Returns:
      `num_iters` triples (a, b, c).

    Raises:
      ValueError: if `num_iters` is not a positive integer, or `coefficients` not the name of a set that
        converges.

    Example:
      >>> iteration_steps(2, "cubic")
      ((1.5, -0.5, 0.0), (1.5, -0.5, 0.0))
    """
    name = "polar_express" if coefficients is None else coefficients
    if name == "muon":
        raise ValueError(
            "coefficients='muon' gives no basis: (3.4445, -4.7750, 2.0315) does not converge to 1 "
            "but leaves singular values between about 0.7 and 1.2; use 'polar_express' or 'cubic'"
        )
    if name not in _SETS:
        names = ", ".join(map(repr, _SETS))
        raise ValueError(f"coefficients must be one of {names} or None, got {coefficients!r}")
    head, tail, default = _SETS[name]
    try:
        count = default if num_iters is None else operator.index(num_iters)
    except TypeError:
        count = 0
    if count < 1 or isinstance(num_iters, bool):
        raise ValueError(f"num_iters must be a positive integer or None, got {num_iters!r}")
    return (head + (tail,) * (count - len(head)))[:count]
