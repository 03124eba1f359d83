"""Compare systems: one config, the same hyper-parameters for each.

    python experiments/compare.py --config=configs/digits.py --workdir=runs/figure1
    python experiments/compare.py --config=configs/mnist.py --config.data.dir=DIR --workdir=runs/mnist \
        --systems=vit,osa --seeds=1 --config.epochs=2 --target=0.97

Trains every system from every seed, by default the six of the paper's Figure 1, and writes
`results.md` (a table), `curves.png` (losses and test error), `report.html` (both, with configs,
versions and machine, in one file) and a folder for each run. `--resume` goes on with a comparison
that was interrupted: finished runs are read, a half-done one goes on, and the missing ones are run.
"""

import time
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from osa_jax.training import (
    FIGURE_1,
    SYSTEMS,
    Trainer,
    define_config,
    html_report,
    plot_curves,
    prepare_workdir,
    results_table,
    run,
    run_program,
)

_CONFIG = define_config()
_WORKDIR = flags.DEFINE_string("workdir", None, "A new folder for results and runs.")
_SYSTEMS = flags.DEFINE_list("systems", list(FIGURE_1), f"What to compare, of {', '.join(SYSTEMS)}.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each system.", lower_bound=1)
_TARGET = flags.DEFINE_float("target", None, "A test accuracy; a column tells the steps to it.", 0.0, 1.0)
_RESUME = flags.DEFINE_bool("resume", False, "Go on with the comparison in the folder.")
_SMOKE = flags.DEFINE_bool("smoke", False, "A few steps and one seed, to see that it all works.")
flags.mark_flags_as_required(["config", "workdir"])


def of_system(config: ConfigDict, name: str) -> ConfigDict:
    """The same config with the model's switches of one system."""
    if name not in SYSTEMS:
        raise ValueError(f"--systems must name systems of {', '.join(SYSTEMS)}, got {name!r}.")
    config = ConfigDict(config.to_dict())
    config.model.update(SYSTEMS[name].model)
    if _SMOKE.value:
        config.update({"num_steps": 4, "epochs": None, "eval_every": 2, "optimizer": {"warmup_steps": 1}})
    return config


def main() -> None:
    """Train everything, then write and print the results."""
    start = time.monotonic()
    configs = {name: of_system(_CONFIG.value, name) for name in _SYSTEMS.value}
    workdir = prepare_workdir(_WORKDIR.value, resume=_RESUME.value)
    seeds = range(_CONFIG.value.seed, _CONFIG.value.seed + (1 if _SMOKE.value else _SEEDS.value))
    runs = {}
    for name, config in configs.items():
        trainer, label = Trainer(config), SYSTEMS[name].label
        runs[label] = []
        for seed in seeds:
            folder = workdir / name / f"seed{seed}"
            begun = _RESUME.value and (folder / "config.json").exists()
            runs[label].append(run(trainer, seed=seed, workdir=folder, label=label, resume=begun))
        accuracy = ", ".join(f"{100 * rows[-1]['test_accuracy']:.1f}" for rows in runs[label])
        print(f"{label}: test accuracy {accuracy} % ({time.monotonic() - start:.0f} s)")
    write_results(runs, configs, workdir, len(seeds))


def write_results(runs: dict, configs: dict, workdir: Path, num_seeds: int) -> None:
    """Write table, figure and page, print the table and where they are."""
    title = f"{_CONFIG.value.data.name}: mean and range over {num_seeds} seed(s)"
    table, figure, page = results_table(runs, target=_TARGET.value), workdir / "curves.png", workdir / "report.html"
    (workdir / "results.md").write_text(table + "\n")
    plot_curves(runs, figure, title=title)
    values = {SYSTEMS[name].label: config.to_dict() for name, config in configs.items()}
    page.write_text(html_report(title=title, table=table, figures=[figure], configs=values))
    print(f"\n{table}\n\nTable:  {workdir / 'results.md'}\nFigure: {figure}\nReport: {page}")


if __name__ == "__main__":
    run_program(main)
