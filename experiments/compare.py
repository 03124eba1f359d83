"""Compare the systems of the paper's Figure 1: one config, the same hyper-parameters for each.

    python experiments/compare.py --config=configs/digits.py --workdir=runs/figure1

Trains every system from every seed and writes `results.md` (a table), `curves.png` (train and test
loss) and, in a folder for each run, `config.json` and `metrics.jsonl`.
"""

import time
from pathlib import Path

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from osa_jax.training import (
    FIGURE_1,
    SYSTEMS,
    Trainer,
    one_line_errors,
    plot_curves,
    prepare_workdir,
    results_table,
    run,
)

_CONFIG = config_flags.DEFINE_config_file("config", None, "The config file, of any system.")
_WORKDIR = flags.DEFINE_string("workdir", None, "A new folder for results and metrics.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each system.", lower_bound=1)
_SMOKE = flags.DEFINE_bool("smoke", False, "A few steps and one seed, to see that it all works.")
flags.mark_flags_as_required(["config", "workdir"])


def of_system(config: ConfigDict, name: str) -> ConfigDict:
    """The same config with the model's switches of one system."""
    config = ConfigDict(config.to_dict())
    config.model.update(SYSTEMS[name].model)
    if _SMOKE.value:
        config.update({"num_steps": 4, "eval_every": 2, "optimizer": {"warmup_steps": 1}})
    return config


def main(_: list[str]) -> None:
    """Train everything, then write and print the results."""
    logging.set_verbosity(logging.WARNING)
    with one_line_errors():
        start = time.monotonic()
        workdir = prepare_workdir(_WORKDIR.value)
        seeds = range(_CONFIG.value.seed, _CONFIG.value.seed + (1 if _SMOKE.value else _SEEDS.value))
        runs = {}
        for name in FIGURE_1:
            system = SYSTEMS[name]
            trainer = Trainer(of_system(_CONFIG.value, name))
            runs[system.label] = [
                run(trainer, seed=seed, workdir=workdir / name / f"seed{seed}", label=system.label) for seed in seeds
            ]
            accuracy = ", ".join(f"{100 * rows[-1]['test_accuracy']:.1f}" for rows in runs[system.label])
            print(f"{system.label}: test accuracy {accuracy} % ({time.monotonic() - start:.0f} s)")
        write_results(runs, workdir, len(seeds))


def write_results(runs: dict, workdir: Path, num_seeds: int) -> None:
    """Write the table and the figure, print the table and where both are."""
    table = results_table(runs)
    (workdir / "results.md").write_text(table + "\n")
    title = f"{_CONFIG.value.data.name}: mean and range over {num_seeds} seed(s)"
    plot_curves(runs, workdir / "curves.png", title=title)
    print(f"\n{table}\n\nTable:  {workdir / 'results.md'}\nFigure: {workdir / 'curves.png'}")


if __name__ == "__main__":
    app.run(main)
