"""Classify image files with a trained model.

    python experiments/predict.py --workdir=runs/osa --figure=predictions.png three.png seven.jpg
    python experiments/predict.py --workdir=runs/osa --figure=predictions.png --invert scans/*.png

Images of any size are made like those of the model's data set; `--invert` is for dark strokes on a
light ground. Prints the likeliest class of each file and draws all of them with their probabilities.
"""

from pathlib import Path

import numpy as np
from absl import flags

from osa_jax.training import load_run, plot_predictions, read_picture, run_program

_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of a run.")
_FIGURE = flags.DEFINE_string("figure", "predictions.png", "The PNG file to draw.")
_INVERT = flags.DEFINE_bool("invert", False, "Whether the files are dark on light.")
flags.mark_flag_as_required("workdir")


def main(paths: list[str]) -> None:
    """Read, classify, print and draw."""
    if not paths:
        raise ValueError("No image file is given: name them after the flags.")
    trainer, snapshot = load_run(_WORKDIR.value)
    images = np.stack([read_picture(path, trainer.dataset, invert=_INVERT.value) for path in paths])
    probabilities = np.asarray(trainer.functions.predict(snapshot.state, images))
    for path, row in zip(paths, probabilities, strict=True):
        first, second = np.argsort(row)[:-3:-1]
        print(f"{path}: {first} ({100 * row[first]:.1f} %), else {second} ({100 * row[second]:.1f} %)")
    plot_predictions(images, probabilities, _FIGURE.value, names=[Path(path).name for path in paths])
    print(f"Figure: {_FIGURE.value}")


if __name__ == "__main__":
    run_program(main, takes_arguments=True)
