"""Shows how a run is going: a live bar on a terminal, a plain line now and then anywhere else."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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

    def __init__(self, label: str, num_steps: int, *, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._label = label
        self._num_steps = num_steps
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
        self._task = self._bar.add_task(label, total=num_steps, numbers="compiling")
        self._shown_at = self._first_step_at = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Take note of a step; show its numbers when it is time."""
        now = time.monotonic()
        if step == 1:
            self._first_step_at = now
        pause = BAR_SECONDS if self.console.is_terminal else LINE_SECONDS
        if now - self._shown_at < pause and step < self._num_steps:
            return
        loss, accuracy = float(metrics["loss"]), float(metrics["accuracy"])
        now = self._shown_at = time.monotonic()
        rate = (step - 1) / max(now - self._first_step_at, 1e-9)
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
