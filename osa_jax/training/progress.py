"""Shows how a run is going: a live bar on a terminal, a plain line now and then anywhere else."""

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from osa_jax.training.loop import Row
from osa_jax.training.state import Metrics

BAR_SECONDS = 0.5
LINE_SECONDS = 10.0


class RunProgress:
    """Loss, accuracy, steps per second and time left of one run, as a context manager.

    The numbers are those of the newest step whenever they are shown; reading them waits for the
    device, hence only every half second (every ten seconds without a terminal).

    Args:
      label: what is being trained.
      num_steps: the length of the run.
      done: steps done before, when the run goes on.
      console: where to write, by default the standard error stream.

    Example:
      >>> import io
      >>> from rich.console import Console
      >>> console = Console(file=io.StringIO())
      >>> with RunProgress("vit", 2, console=console) as progress:
      ...     for step in (1, 2):
      ...         progress.on_step(step, {"loss": 2.3, "accuracy": 0.1})
      >>> console.file.getvalue().split(", ")[:3]
      ['vit: step 2/2', 'loss 2.300', 'accuracy 10.0 %']
    """

    def __init__(self, label: str, num_steps: int, *, done: int = 0, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._label = label
        self._num_steps = num_steps
        self._first_step = done + 1
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=num_steps, completed=done, numbers="compiling")
        self._shown_at = self._first_step_at = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Take note of a step; show its numbers when it is time."""
        now = time.monotonic()
        if step == self._first_step:
            self._first_step_at = now
        pause = BAR_SECONDS if self.console.is_terminal else LINE_SECONDS
        if now - self._shown_at < pause and step < self._num_steps:
            return
        loss, accuracy = float(metrics["loss"]), float(metrics["accuracy"])
        now = self._shown_at = time.monotonic()
        rate = (step - self._first_step) / max(now - self._first_step_at, 1e-9)
        numbers = f"loss {loss:.3f}, accuracy {100 * accuracy:.1f} %, {rate:.1f} steps/s"
        self._bar.update(self._task, completed=step, numbers=numbers)
        if not self.console.is_terminal:
            left = f"{(self._num_steps - step) / rate:.0f} s left" if rate else "compiled"
            self.console.print(
                f"{self._label}: step {step}/{self._num_steps}, {numbers}, {left}",
                soft_wrap=True,
                highlight=False,
                markup=False,
            )


def summary_table(rows: Sequence[Row], *, seconds: float, workdir: str | Path) -> Table:
    """What came out of a run, for a terminal.

    Args:
      rows: the run's rows, see `Trainer.steps`.
      seconds: how long it took, with compilation and evaluation.
      workdir: where its files are.

    Returns:
      A table of two columns.

    Example:
      >>> row = {"step": 4, "train_loss": 0.5, "test_loss": 0.6, "test_accuracy": 0.75}
      >>> row |= {"steps_per_second": 20.0, "examples_per_second": 80.0}
      >>> Console(width=60).print(summary_table([row], seconds=61, workdir="runs/osa"))
      Test accuracy     75.0 % (best 75.0 % at step 4)
      Test loss         0.600
      Train loss        0.500
      Speed             20.0 steps/s, 80 examples/s
      Time              0:01:01
      Files             runs/osa
    """
    last, best = rows[-1], max(rows, key=lambda row: row["test_accuracy"])
    table = Table(show_header=False, box=None)
    accuracy = f"{100 * last['test_accuracy']:.1f} % (best {100 * best['test_accuracy']:.1f} % at step {best['step']})"
    table.add_row("Test accuracy", accuracy)
    table.add_row("Test loss", f"{last['test_loss']:.3f}")
    table.add_row("Train loss", f"{last['train_loss']:.3f}")
    table.add_row("Speed", f"{last['steps_per_second']:.1f} steps/s, {last['examples_per_second']:.0f} examples/s")
    table.add_row("Time", str(timedelta(seconds=round(seconds))))
    table.add_row("Files", str(workdir))
    return table
