"""A run on disk: its folder, its config and its rows of metrics."""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from osa_jax.training.loop import Row, Trainer
from osa_jax.training.progress import RunProgress

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.json"


def prepare_workdir(workdir: str | Path) -> Path:
    """Make the folder of a new run.

    Args:
      workdir: the folder; its parents are made too.

    Returns:
      The folder.

    Raises:
      ValueError: if a run is already there, or nothing can be written there.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     prepare_workdir(folder + "/run").name
      'run'
    """
    folder = Path(workdir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"workdir {str(folder)!r} cannot be written ({error.strerror}): choose another folder."
        ) from error
    if (folder / METRICS_FILE).exists():
        raise ValueError(f"workdir {str(folder)!r} already holds a run: choose another folder or remove it.")
    return folder


def run(trainer: Trainer, *, seed: int, workdir: str | Path, label: str = "training") -> list[Row]:
    """Train from one seed, with a progress bar, and keep config and metrics in a folder.

    `config.json` holds the config, `metrics.jsonl` one JSON object a row, written as it comes: what
    is there stays when the run is interrupted.

    Args:
      trainer: what to train.
      seed: the seed of this run, in place of the config's.
      workdir: a folder that holds no run yet.
      label: the run's name beside the progress bar.

    Returns:
      The rows, see `Trainer.fit`.

    Raises:
      ValueError: if the folder holds a run or cannot be written.
      FloatingPointError: naming the first step that was not finite.
    """
    folder = prepare_workdir(workdir)
    config = trainer.config.to_dict() | {"seed": seed}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    rows = []
    with (
        (folder / METRICS_FILE).open("x") as file,
        RunProgress(label, trainer.config.num_steps) as progress,
    ):
        for row in trainer.fit(seed, on_step=progress.on_step):
            file.write(json.dumps(row) + "\n")
            file.flush()
            rows.append(row)
    return rows


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End a program on a user's error with that one line: exit code 1, or 130 on Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        print("Interrupted: the metrics written so far are kept.", file=sys.stderr)
        raise SystemExit(130) from None
    except (ValueError, FloatingPointError) as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
