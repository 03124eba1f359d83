"""Training: a config in, a trained model and its rows of metrics out."""

from osa_jax.training.config import check_config
from osa_jax.training.loop import Row, Trainer
from osa_jax.training.report import plot_curves, results_table
from osa_jax.training.runs import one_line_errors, prepare_workdir, run
from osa_jax.training.state import (
    TrainFunctions,
    TrainState,
    judge,
    make_optimizer,
    make_train_functions,
)
from osa_jax.training.systems import FIGURE_1, SYSTEMS, System

__all__ = [
    "FIGURE_1",
    "SYSTEMS",
    "Row",
    "System",
    "TrainFunctions",
    "TrainState",
    "Trainer",
    "check_config",
    "judge",
    "make_optimizer",
    "make_train_functions",
    "one_line_errors",
    "plot_curves",
    "prepare_workdir",
    "results_table",
    "run",
]
