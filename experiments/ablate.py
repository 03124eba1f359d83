"""Ablate: one config, one setting at a time.

    python experiments/ablate.py --config=configs/digits.py:osa --axis=alpha --workdir=runs/ablate
    python experiments/ablate.py --config=configs/mnist.py:osa --config.data.dir=DIR --workdir=runs/ablate \
        --axis=method --values=exact,newton_schulz:2,newton_schulz:8 --seeds=1 --config.epochs=2

Trains the config with every value of the axis from every seed. In a folder of the axis's name in
the workdir it writes `results.md` (a table), `values.png` (final test accuracy against the value),
`curves.png`, `report.html` (all of it in one file) and a folder for each run. `--resume` goes on with
an ablation that was interrupted: finished runs are read, a half-done one goes on, the missing are run.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from absl import flags

from osa_jax.training import Variant, changed, define_config, plot_values, run_grid, run_program, write_report


class Axis(NamedTuple):
    """What is varied: its default values, and what one of them changes in the config."""

    values: str
    changes: Callable[[str], dict]


def alpha(value: str) -> dict:
    """The scale's start, trained for every head; `0.1:layer` is one for a layer's heads, `0.1:fixed` stays there."""
    start, _, kind = value.partition(":")
    if kind not in ("", "layer", "fixed"):
        raise ValueError(f"{kind!r} must be 'layer' or 'fixed'")
    optimizer = {"alpha_learning_rate_factor": 0.0} if kind == "fixed" else {}
    return {"model": {"alpha": float(start), "share_alpha": kind == "layer"}, "optimizer": optimizer}


def method(value: str) -> dict:
    """`exact`, `dense`, `qr` or `newton_schulz`; `newton_schulz:4` is four iterations."""
    name, _, iterations = value.partition(":")
    return {"model": {"method": name, "num_iters": int(iterations) if iterations else None}}


def activation(value: str) -> dict:
    """A gain, a number or `preserve`, or one of the shapings `dks` and `tat`."""
    if value in ("dks", "tat"):
        return {"model": {"activation_gain": 1.0, "activation_shaping": value}}
    gain = value if value == "preserve" else float(value)
    return {"model": {"activation_gain": gain, "activation_shaping": "none"}}


AXES = {
    "alpha": Axis("0.02,0.05,0.1,0.2,0.5,0.1:layer,0.02:fixed,0.1:fixed,0.5:fixed", alpha),
    "method": Axis("exact,qr,newton_schulz:2,newton_schulz:4,newton_schulz:8", method),
    "head_init": Axis("joint,independent", lambda value: {"model": {"head_init": value}}),
    "activation": Axis("1.0,1.1,1.2,1.3,1.4,preserve,dks,tat", activation),
    "depth": Axis("3,6,12,24", lambda value: {"model": {"depth": int(value)}}),
    "qk_features": Axis("4,8,16,32,64", lambda value: {"model": {"qk_features": int(value)}}),
}

_CONFIG = define_config()
_WORKDIR = flags.DEFINE_string("workdir", None, "A folder for the ablations of one config.")
_AXIS = flags.DEFINE_enum("axis", None, list(AXES), "What is varied.")
_VALUES = flags.DEFINE_list("values", None, "Its values, in place of those in this file.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each value.", lower_bound=1)
_TARGET = flags.DEFINE_float("target", None, "A test accuracy; a column tells the steps to it.", 0.0, 1.0)
_RESUME = flags.DEFINE_bool("resume", False, "Go on with the ablation in the folder.")
flags.mark_flags_as_required(["config", "workdir", "axis"])


def variant(value: str) -> Variant:
    """The config with one value of the axis."""
    try:
        return Variant(value, changed(_CONFIG.value, AXES[_AXIS.value].changes(value)))
    except ValueError as error:
        examples = AXES[_AXIS.value].values
        raise ValueError(f"--values of {_AXIS.value} are written as {examples}; got {value!r}.") from error


def main() -> None:
    """Train everything, then write and print the results."""
    config, axis, workdir = _CONFIG.value, _AXIS.value, Path(_WORKDIR.value) / _AXIS.value
    if axis in ("alpha", "method") and config.model.attention != "orthogonal":
        raise ValueError(f"--axis={axis} is orthogonal attention's, got a config with {config.model.attention!r}.")
    values = _VALUES.value or AXES[axis].values.split(",")
    variants = {value.replace(":", "-"): variant(value) for value in values}
    seeds = range(config.seed, config.seed + _SEEDS.value)
    runs = run_grid(variants, seeds=seeds, workdir=workdir, resume=_RESUME.value)
    title = f"{config.data.name}: {axis}, {len(seeds)} seed{'s' * (len(seeds) > 1)}"
    figure = workdir / "values.png"
    plot_values(runs, figure, title=title, axis=axis)
    write_report(runs, variants, workdir, title=title, heading=axis, target=_TARGET.value, figures=[figure])


if __name__ == "__main__":
    run_program(main)
