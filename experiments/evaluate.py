"""Evaluate a trained model on its test set.

    python experiments/evaluate.py --workdir=runs/osa
    python experiments/evaluate.py --workdir=runs/osa --checkpoint=newest --figure=confusion.png

Prints loss, accuracy and the confusion matrix of the best checkpoint, or of the newest.
"""

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from osa_jax.data import evaluation_batches
from osa_jax.training import load_run, plot_confusion, run_program

_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of a run.")
_CHECKPOINT = flags.DEFINE_enum("checkpoint", "best", ["best", "newest"], "Which checkpoint.")
_FIGURE = flags.DEFINE_string("figure", None, "A PNG file for the confusion matrix.")
flags.mark_flag_as_required("workdir")


def main() -> None:
    """Load, evaluate, print."""
    trainer, snapshot = load_run(_WORKDIR.value, best=_CHECKPOINT.value == "best")
    test = trainer.dataset.test
    batches = evaluation_batches(test, batch_size=trainer.config.eval_batch_size)
    metrics = trainer.functions.evaluate(snapshot.state, batches)
    confusion = np.asarray(metrics["confusion"])
    print(f"Step {snapshot.step}, {len(test.labels):,} test images of {trainer.config.data.name}:")
    print(f"test loss {metrics['loss']:.4f}, test accuracy {100 * metrics['accuracy']:.2f} %")
    Console().print(confusion_table(confusion))
    if _FIGURE.value:
        plot_confusion(confusion, _FIGURE.value, title=f"{_WORKDIR.value}, step {snapshot.step}")
        print(f"Figure: {_FIGURE.value}")


def confusion_table(confusion: np.ndarray) -> Table:
    """Counts, one true class a line, with the share of it that is right."""
    table = Table(title="Confusion matrix: true classes down, predicted classes across")
    table.add_column("", justify="right")
    for predicted in range(len(confusion)):
        table.add_column(str(predicted), justify="right")
    table.add_column("right", justify="right")
    for true, counts in enumerate(confusion):
        cells = [f"{count:.0f}" if count else "·" for count in counts]
        share = f"{100 * counts[true] / counts.sum():.1f} %" if counts.sum() else "-"
        table.add_row(str(true), *cells, share)
    return table


if __name__ == "__main__":
    run_program(main)
