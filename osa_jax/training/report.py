"""The table and the figure that compare systems over seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from osa_jax.training.loop import Row

Runs = Mapping[str, Sequence[Sequence[Row]]]

# Okabe and Ito's colours, which colour-blind readers can tell apart; in grey the styles do it.
# Later lines are thinner, so that curves which coincide all show.
COLOURS = ("#000000", "#E69F00", "#D55E00", "#0072B2", "#56B4E9", "#009E73")
STYLES = ("-", (0, (5, 1)), (0, (1, 1)), "-", (0, (5, 2)), (0, (3, 1, 1, 1)))


def results_table(runs: Runs) -> str:
    """The last rows of every system as a Markdown table, mean and standard deviation over seeds.

    Args:
      runs: for each system's label the rows of each of its seeds.

    Returns:
      The table, one system a line.

    Example:
      >>> row = {"test_accuracy": 0.9, "test_loss": 0.5, "train_loss": 0.25}
      >>> row["steps_per_second"] = 20.0
      >>> print(results_table({"ViT": [[row], [row | {"test_accuracy": 0.8}]]}))
      | system | test accuracy (%) | test loss | train loss | steps/s |
      |---|---|---|---|---|
      | ViT | 85.0 ± 7.1 | 0.500 ± 0.000 | 0.250 ± 0.000 | 20.0 |
    """
    lines = [
        "| system | test accuracy (%) | test loss | train loss | steps/s |",
        "|---|---|---|---|---|",
    ]
    for label, seeds in runs.items():
        last = [rows[-1] for rows in seeds]
        lines.append(
            f"| {label} | {_spread(last, 'test_accuracy', scale=100, digits=1)} "
            f"| {_spread(last, 'test_loss')} | {_spread(last, 'train_loss')} "
            f"| {np.median([row['steps_per_second'] for row in last]):.1f} |"
        )
    return "\n".join(lines)


def plot_curves(runs: Runs, path: str | Path, *, title: str) -> None:
    """Draw train and test loss against the step: lines are means, bands the range over seeds.

    The axis of the losses is logarithmic where they span more than a factor of ten.

    Args:
      runs: for each system's label the rows of each of its seeds.
      path: the PNG file to write.
      title: the figure's title.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    everything = []
    for axes, key, name in zip(panels, ("train_loss", "test_loss"), ("Train loss", "Test loss"), strict=True):
        for index, (label, seeds) in enumerate(runs.items()):
            steps = [row["step"] for row in seeds[0]]
            losses = np.array([[row[key] for row in rows] for rows in seeds])
            everything.append(losses)
            colour, style = COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)]
            look = {"color": colour, "linestyle": style, "linewidth": 3 - 0.3 * index}
            axes.plot(steps, losses.mean(0), label=label, **look)
            axes.fill_between(steps, losses.min(0), losses.max(0), color=colour, alpha=0.15, linewidth=0)
        axes.set(title=name, xlabel="Step")
        axes.grid(True, which="major", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("Cross-entropy")
    values = np.concatenate([losses.ravel() for losses in everything])
    if values.min() > 0 and values.max() > 10 * values.min():
        panels[0].set_yscale("log")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)


def _spread(rows: Sequence[Row], key: str, *, scale: float = 1, digits: int = 3) -> str:
    values = scale * np.array([row[key] for row in rows])
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {values.std(ddof=1):.{digits}f}"
