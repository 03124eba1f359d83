"""Rank collapse in one table and two figures: what is left of the tokens on the way through models.

Shape legend: `N` tokens, `L` blocks, `2L + 1` stages, see `osa_jax.models.signal`.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from osa_jax.models.signal import Signal, measure_signal
from osa_jax.training.report import line_style, markdown_table

Signals = Mapping[str, Mapping[str, Signal]]

SPECTRUM_FLOOR = 1e-8
"""The smallest share of a kernel's trace that is drawn: float32 knows the singular values to 1e-7 of the largest."""


def median_signal(models: Iterable[Callable[..., Any]], images: np.ndarray) -> Signal:
    """The measures of one kind of model through depth.

    Args:
      models: one for each seed, all of one architecture, as `ViT`.
      images: `[B, H, W, C]`.

    Returns:
      The medians over images and models: NumPy arrays without the batch axis of `Signal`.
    """
    measured = []
    for model in models:
        _, out = model(images, deterministic=True, return_intermediates=True)
        measured.append(jax.device_get(measure_signal(out)))
    return jax.tree.map(lambda *parts: np.median(np.concatenate(parts), axis=0), *measured)


def signal_table(signals: Signals) -> str:
    """The measures at the last block as a Markdown table.

    Args:
      signals: for each kind of models, and in it for each system's label, the measures.

    Returns:
      The table, one line a system and kind.

    Example:
      >>> import numpy as np
      >>> signal = Signal(np.eye(3), np.array([3.0, 3.0, 1.5]), np.array([0.0, 0.0, 0.5]), np.array([1.0]))
      >>> print(signal_table({"depth 1": {"OSA": signal}}))
      | system | models | effective rank, tokens | last block | kept by attention (%) | cosine, tokens | last block |
      |---|---|---|---|---|---|---|
      | OSA | depth 1 | 3.00 | 1.50 | 100.0 | 0.000 | 0.500 |
    """
    headings = ["system", "models", "effective rank, tokens", "last block", "kept by attention (%)"]
    lines = [
        [
            label,
            kind,
            *(f"{signal.rank[stage]:.2f}" for stage in (0, -1)),
            f"{100 * signal.attention_kept[-1]:.1f}",
            *(f"{signal.cosine[stage]:.3f}" for stage in (0, -1)),
        ]
        for kind, systems in signals.items()
        for label, signal in systems.items()
    ]
    return markdown_table([*headings, "cosine, tokens", "last block"], lines)


def plot_signals(signals: Signals, path: str | Path, *, title: str) -> None:
    """Draw effective rank, what attention alone leaves of it, and cosine, against the block.

    Between two blocks there is a point after the attention: what it changes and what the MLP changes
    are two steps of a line.

    Args:
      signals: see `signal_table`; a column each kind, a line each system.
      path: the PNG file to write.
      title: the figure's title.
    """

    def draw(axes: Any, row: int, signal: Signal, style: dict[str, Any]) -> None:
        values = (signal.rank, np.concatenate([[1.0], signal.attention_kept]), signal.cosine)[row]
        axes.plot(np.linspace(0, len(signal.attention_kept), len(values)), values, **style)

    rows = ("Effective rank", "Effective rank kept by attention", "Cosine of two tokens")
    figure, panels = _panels(signals, rows, draw, xlabel="Block", title=title)
    panels[1, 0].set_ylim(bottom=0)
    figure.savefig(path)


def plot_spectra(signals: Signals, path: str | Path, *, title: str) -> None:
    """Draw the kernel's spectrum of the tokens, after the first attention, and after the last block.

    Args:
      signals: see `signal_table`; a column each kind, a line each system.
      path: the PNG file to write.
      title: the figure's title.
    """

    def draw(axes: Any, row: int, signal: Signal, style: dict[str, Any]) -> None:
        spectrum = signal.spectrum[(0, 1, -1)[row]]
        axes.plot(range(1, len(spectrum) + 1), np.maximum(spectrum, SPECTRUM_FLOOR), **style)

    places = ("Tokens", "After the first attention", "After the last block")
    rows = tuple(f"{place}:\nshare of the trace" for place in places)
    figure, panels = _panels(signals, rows, draw, xlabel="Eigenvalue of the tokens' kernel", title=title)
    for axes in panels.ravel():
        axes.set_yscale("log")
        axes.set_ylim(SPECTRUM_FLOOR / 2, 2)
    figure.savefig(path)


def _panels(signals: Signals, rows: tuple[str, ...], draw: Any, *, xlabel: str, title: str) -> tuple[Any, np.ndarray]:
    """A figure with a column each kind, in which `draw` has drawn each system into each row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 3.4 * len(signals), 2.6 * len(rows) + 1.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(len(rows), len(signals), sharex="col", sharey="row", squeeze=False)
    labels = list(dict.fromkeys(label for systems in signals.values() for label in systems))
    for column, (kind, systems) in enumerate(signals.items()):
        panels[0, column].set_title(kind)
        panels[-1, column].set_xlabel(xlabel)
        for row, axes in enumerate(panels[:, column]):
            for label, signal in systems.items():
                draw(axes, row, signal, line_style(labels.index(label)) | {"label": label})
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(True, which="major", alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
    for axes, name in zip(panels[:, 0], rows, strict=True):
        axes.set_ylabel(name)
    handles = {text: line for axes in panels[0] for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False)
    return figure, panels
