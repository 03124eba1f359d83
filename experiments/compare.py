"""Compare systems: one config, but for the switches of each, which win over overrides of the same keys.

    python experiments/compare.py --config=configs/digits.py --workdir=runs/figure1
    python experiments/compare.py --config=configs/mnist.py --config.data.dir=DIR --workdir=runs/mnist \
        --systems=vit,osa --seeds=1 --config.epochs=2 --target=0.97

Trains every system from every seed, by default the six of the paper's Figure 1, and writes
`results.md` (a table), `curves.png` (losses and test error), `report.html` (both, with configs,
versions and machine, in one file) and a folder for each run. `--resume` goes on with a comparison
that was interrupted: finished runs are read, a half-done one goes on, and the missing ones are run.
"""

from absl import flags

from osa_jax.training import (
    FIGURE_1,
    SYSTEMS,
    changed,
    define_config,
    run_grid,
    run_program,
    system_variant,
    write_report,
)

_CONFIG = define_config()
_WORKDIR = flags.DEFINE_string("workdir", None, "A new folder for results and runs.")
_SYSTEMS = flags.DEFINE_list("systems", list(FIGURE_1), f"What to compare, of {', '.join(SYSTEMS)}.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each system.", lower_bound=1)
_TARGET = flags.DEFINE_float("target", None, "A test accuracy; a column tells the steps to it.", 0.0, 1.0)
_RESUME = flags.DEFINE_bool("resume", False, "Go on with the comparison in the folder.")
_SMOKE = flags.DEFINE_bool("smoke", False, "A few steps and one seed, to see that it all works.")
flags.mark_flags_as_required(["config", "workdir"])

_FEW_STEPS = {"num_steps": 4, "epochs": None, "eval_every": 2, "optimizer": {"warmup_steps": 1}}


def main() -> None:
    """Train everything, then write and print the results."""
    config = changed(_CONFIG.value, _FEW_STEPS if _SMOKE.value else {})
    variants = {name: system_variant(config, name) for name in _SYSTEMS.value}
    seeds = range(config.seed, config.seed + (1 if _SMOKE.value else _SEEDS.value))
    runs = run_grid(variants, seeds=seeds, workdir=_WORKDIR.value, resume=_RESUME.value)
    title = f"{config.data.name}, " + ("one seed" if len(seeds) == 1 else f"mean and range over {len(seeds)} seeds")
    write_report(runs, variants, _WORKDIR.value, title=title, target=_TARGET.value)


if __name__ == "__main__":
    run_program(main)
