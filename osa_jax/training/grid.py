"""A grid of runs: several configs, several seeds, resumed where they stopped, and one report."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from osa_jax.training.html import html_report
from osa_jax.training.loop import Row, Trainer
from osa_jax.training.report import plot_curves, results_table
from osa_jax.training.runs import prepare_workdir, run
from osa_jax.training.systems import Variant


def run_grid(
    variants: Mapping[str, Variant], *, seeds: Sequence[int], workdir: str | Path, resume: bool = False
) -> dict[str, list[list[Row]]]:
    """Train every variant from every seed, and print a line after each variant.

    Every run has its own folder `workdir/name/seedN`. With `resume`, finished runs are read, a
    half-done one goes on, and what is missing is run.

    Args:
      variants: by the names of their folders.
      seeds: the seeds of each variant, in place of the config's.
      workdir: the folder of all.
      resume: whether it may hold runs of these variants already.

    Returns:
      For each variant's label the rows of each of its seeds.

    Raises:
      ValueError: if a config is wrong, before the first run begins, or a folder holds another run.
      Exception: what `run` raises besides.
    """
    start = time.monotonic()
    folder = prepare_workdir(workdir, resume=resume)
    # All of them first: what is wrong in the last config shows now, not after hours.
    trainers = {name: Trainer(variant.config) for name, variant in variants.items()}
    runs: dict[str, list[list[Row]]] = {}
    for name, trainer in trainers.items():
        label = variants[name].label
        runs[label] = []
        for seed in seeds:
            own = folder / name / f"seed{seed}"
            begun = resume and (own / "config.json").exists()
            runs[label].append(run(trainer, seed=seed, workdir=own, label=label, resume=begun))
        accuracy = ", ".join(f"{100 * rows[-1]['test_accuracy']:.1f}" for rows in runs[label])
        print(f"{label}: test accuracy {accuracy} % ({time.monotonic() - start:.0f} s)")
    return runs


def write_report(
    runs: Mapping[str, Sequence[Sequence[Row]]],
    variants: Mapping[str, Variant],
    workdir: str | Path,
    *,
    title: str,
    heading: str = "system",
    target: float | None = None,
    figures: Sequence[Path] = (),
) -> None:
    """Write `results.md`, `curves.png` and `report.html`, print the table and where they are.

    Args:
      runs: what `run_grid` returned.
      variants: what it was called with.
      workdir: the folder to write to.
      title: of figure and page.
      heading: the table's first heading, what the variants are.
      target: see `results_table`.
      figures: PNG files that the page is to hold besides the curves, before them.
    """
    folder = Path(workdir)
    table, curves, page = (
        results_table(runs, heading=heading, target=target),
        folder / "curves.png",
        folder / "report.html",
    )
    (folder / "results.md").write_text(table + "\n")
    plot_curves(runs, curves, title=title)
    configs = {variant.label: variant.config.to_dict() for variant in variants.values()}
    page.write_text(html_report(title=title, table=table, figures=[*figures, curves], configs=configs))
    paths = [("Table", folder / "results.md"), *(("Figure", path) for path in (*figures, curves)), ("Report", page)]
    print(f"\n{table}\n\n" + "\n".join(f"{name + ':':<7} {path}" for name, path in paths))
