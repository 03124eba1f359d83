"""Figures about one trained model: its confusions, and its predictions."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def plot_confusion(confusion: np.ndarray, path: str | Path, *, title: str) -> None:
    """Draw a confusion matrix: colour is the share of the true class, numbers are counts.

    Args:
      confusion: counts `[C, C]` of true and predicted class.
      path: the PNG file to write.
      title: the figure's title.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    classes = len(confusion)
    figure = Figure(figsize=(1.5 + 0.55 * classes, 1.5 + 0.5 * classes), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    share = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    for (true, predicted), count in np.ndenumerate(confusion):
        if count:
            colour = "white" if share[true, predicted] > 0.5 else "black"
            axes.text(predicted, true, f"{count:.0f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set(title=title, xlabel="Predicted class", ylabel="True class", xticks=range(classes), yticks=range(classes))
    figure.savefig(path)


def plot_predictions(
    images: np.ndarray, probabilities: np.ndarray, path: str | Path, *, names: Sequence[str], columns: int = 4
) -> None:
    """Draw images, each with the probabilities of its classes beside it.

    Args:
      images: `[B, H, W, C]`, as the model saw them; each is drawn between its darkest and lightest.
      probabilities: `[B, classes]`.
      path: the PNG file to write.
      names: what stands above each image.
      columns: the most images in a row.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(4 * columns, 2.4 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, 2 * columns, squeeze=False).reshape(-1, 2)
    for (left, right), image, row, name in zip(panels, images, probabilities, names, strict=False):
        scaled = (image - image.min()) / max(float(np.ptp(image)), 1e-12)
        left.imshow(scaled.squeeze(), cmap="gray", vmin=0, vmax=1)
        left.set_title(name, fontsize=8)
        right.barh(range(len(row)), row, color="#0072B2")
        best = int(row.argmax())
        right.set_title(f"{best} ({100 * row[best]:.1f} %)", fontsize=10)
        right.set(xlim=(0, 1), yticks=range(len(row)))
        right.invert_yaxis()
    for axes in (*panels[:, 0], *panels[len(images) :, 1]):
        axes.axis("off")
    figure.savefig(path)
