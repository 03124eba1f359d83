"""The table and the figures that compare systems, or values of one setting, over seeds."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from osa_jax.training.loop import Row

Runs = Mapping[str, Sequence[Sequence[Row]]]

# Okabe and Ito's colours, which colour-blind readers can tell apart; in grey the styles do it.
# Later lines are thinner, so that curves which coincide all show.
COLOURS = ("#000000", "#E69F00", "#D55E00", "#0072B2", "#56B4E9", "#009E73")
STYLES = ("-", (0, (5, 1)), (0, (1, 1)), "-", (0, (5, 2)), (0, (3, 1, 1, 1)))


def results_table(runs: Runs, *, heading: str = "system", target: float | None = None) -> str:
    """The last rows of every system as a Markdown table, mean and standard deviation over seeds.

    Args:
      runs: for each system's label the rows of each of its seeds.
      heading: of the labels' column.
      target: a test accuracy in [0, 1]; a column tells the first evaluated step that reaches it, the
        median over seeds.

    Returns:
      The table, one system a line.

    Example:
      >>> row = {"test_accuracy": 0.9, "test_loss": 0.5, "train_loss": 0.25, "step": 10}
      >>> row["steps_per_second"] = 20.0
      >>> print(results_table({"ViT": [[row], [row | {"test_accuracy": 0.8}]]}))
      | system | test accuracy (%) | test loss | train loss | steps/s |
      |---|---|---|---|---|
      | ViT | 85.0 ± 7.1 | 0.500 ± 0.000 | 0.250 ± 0.000 | 20.0 |
    """
    headings = [heading, "test accuracy (%)", "test loss", "train loss", "steps/s"]
    if target is not None:
        headings.append(f"steps to {100 * target:g} %")
    lines = []
    for label, seeds in runs.items():
        last = [rows[-1] for rows in seeds]
        line = [label, _spread(last, "test_accuracy", scale=100, digits=1 if target is None else 2)]
        line += [_spread(last, "test_loss"), _spread(last, "train_loss")]
        line.append(f"{np.median([row['steps_per_second'] for row in last]):.1f}")
        if target is not None:
            steps = float(np.median([_first_step(rows, target) for rows in seeds]))
            line.append(f"{steps:.0f}" if np.isfinite(steps) else "not reached")
        lines.append(line)
    return markdown_table(headings, lines)


def markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown.

    Args:
      headings: of the columns.
      lines: the cells of each line.

    Returns:
      The table, without a line break at its end.

    Example:
      >>> print(markdown_table(["a", "b"], [["1", "2"]]))
      | a | b |
      |---|---|
      | 1 | 2 |
    """
    rows = [f"| {' | '.join(cells)} |" for cells in (headings, *lines)]
    return "\n".join([rows[0], "|" + "---|" * len(headings), *rows[1:]])


def line_style(index: int) -> dict[str, Any]:
    """Colour, style and width of a figure's line of that number.

    Args:
      index: the line's number, from 0; a second round through the colours has other styles.

    Returns:
      Keyword arguments of matplotlib's `plot`.

    Example:
      >>> line_style(0)["color"], line_style(6)["linestyle"] == line_style(0)["linestyle"]
      ('#000000', False)
    """
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": STYLES[(index + index // len(COLOURS)) % len(STYLES)],
        "linewidth": max(1, 3 - 0.3 * index),
    }


def plot_curves(runs: Runs, path: str | Path, *, title: str) -> None:
    """Draw losses and test error against the step: lines are means, bands the range over seeds.

    An axis is logarithmic where its values are positive and span more than a factor of ten.

    Args:
      runs: for each system's label the rows of each of its seeds.
      path: the PNG file to write.
      title: the figure's title.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(13, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(1, 3, sharex=True)
    panels[1].sharey(panels[0])
    train = _draw(panels[0], "Train loss", runs, lambda row: row["train_loss"])
    test = _draw(panels[1], "Test loss", runs, lambda row: row["test_loss"])
    error = _draw(panels[2], "Test error (%)", runs, lambda row: 100 * (1 - row["test_accuracy"]))
    panels[0].set_ylabel("Cross-entropy")
    for axes, values in ((panels[0], train + test), (panels[2], error)):
        everything = np.concatenate(values)
        if everything.min() > 0 and everything.max() > 10 * everything.min():
            axes.set_yscale("log")
            axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)


def plot_values(runs: Runs, path: str | Path, *, title: str, axis: str) -> None:
    """Draw the final test accuracy against the values of a setting: mean, range and every seed.

    Args:
      runs: for each value's label the rows of each of its seeds.
      path: the PNG file to write.
      title: the figure's title.
      axis: what the values are of.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5, 1 + 0.9 * len(runs)), 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    accuracy = [[100 * rows[-1]["test_accuracy"] for rows in seeds] for seeds in runs.values()]
    for place, values in enumerate(accuracy):
        axes.vlines(place, min(values), max(values), color=COLOURS[4], linewidth=4, alpha=0.5)
        axes.plot([place] * len(values), values, "o", color=COLOURS[3], markersize=3)
    axes.plot(range(len(runs)), [np.mean(values) for values in accuracy], "D", color=COLOURS[0])
    axes.set(title=title, xlabel=axis, ylabel="Test accuracy (%), mean and range over seeds")
    axes.set_xticks(range(len(runs)), list(runs))
    axes.grid(True, which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _draw(axes: Any, name: str, runs: Runs, value: Callable[[Row], float]) -> list[np.ndarray]:
    """One panel; returns everything that was drawn."""
    drawn = []
    for index, (label, seeds) in enumerate(runs.items()):
        steps = [row["step"] for row in seeds[0]]
        values = np.array([[value(row) for row in rows] for rows in seeds])
        drawn.append(values.ravel())
        style = line_style(index)
        axes.plot(steps, values.mean(0), label=label, **style)
        axes.fill_between(steps, values.min(0), values.max(0), color=style["color"], alpha=0.15, linewidth=0)
    axes.set(title=name, xlabel="Step")
    axes.grid(True, which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return drawn


def _first_step(rows: Sequence[Row], target: float) -> float:
    return next((row["step"] for row in rows if row["test_accuracy"] >= target), float("inf"))


def _spread(rows: Sequence[Row], key: str, *, scale: float = 1, digits: int = 3) -> str:
    values = scale * np.array([row[key] for row in rows])
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {values.std(ddof=1):.{digits}f}"
