"""Training: a config in, a trained model, its rows of metrics and its checkpoints out."""

from osa_jax.training.checkpoints import Best, Checkpoints
from osa_jax.training.config import changed, check_config, checkpoint_settings, run_settings
from osa_jax.training.figures import plot_confusion, plot_predictions
from osa_jax.training.grid import run_grid, write_report
from osa_jax.training.html import html_report
from osa_jax.training.loop import Moment, Row, Snapshot, Trainer
from osa_jax.training.optimizers import make_optimizer, make_schedule
from osa_jax.training.pictures import read_picture
from osa_jax.training.programs import define_config, one_line_errors, run_program
from osa_jax.training.progress import RunProgress, summary_table
from osa_jax.training.records import Records, read_rows
from osa_jax.training.report import plot_curves, plot_values, results_table
from osa_jax.training.runs import Terminated, load_run, prepare_workdir, run
from osa_jax.training.signals import (
    median_signal,
    plot_signals,
    plot_spectra,
    signal_table,
)
from osa_jax.training.state import (
    TrainFunctions,
    TrainState,
    judge,
    make_train_functions,
)
from osa_jax.training.systems import FIGURE_1, SYSTEMS, System, Variant, system_of, system_variant

__all__ = [
    "FIGURE_1",
    "SYSTEMS",
    "Best",
    "Checkpoints",
    "Moment",
    "Records",
    "Row",
    "RunProgress",
    "Snapshot",
    "System",
    "Terminated",
    "TrainFunctions",
    "TrainState",
    "Trainer",
    "Variant",
    "changed",
    "check_config",
    "checkpoint_settings",
    "define_config",
    "html_report",
    "judge",
    "load_run",
    "make_optimizer",
    "make_schedule",
    "make_train_functions",
    "median_signal",
    "one_line_errors",
    "plot_confusion",
    "plot_curves",
    "plot_predictions",
    "plot_signals",
    "plot_spectra",
    "plot_values",
    "prepare_workdir",
    "read_picture",
    "read_rows",
    "results_table",
    "run",
    "run_grid",
    "run_program",
    "run_settings",
    "signal_table",
    "summary_table",
    "system_of",
    "system_variant",
    "write_report",
]
