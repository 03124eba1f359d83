"""The files of a run besides its checkpoints: its config and its rows of metrics."""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from osa_jax.training.loop import Row

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.json"
TENSORBOARD_FOLDER = "tensorboard"


def read_rows(folder: str | Path) -> list[Row]:
    """The rows of a run.

    Args:
      folder: the run's folder.

    Returns:
      The rows of its `metrics.jsonl`, up to the first line that is not complete; none without the
      file.

    Example:
      >>> import tempfile, pathlib
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = pathlib.Path(folder, "metrics.jsonl").write_text('{"step": 5}\\n{"step": 1')
      ...     read_rows(folder)
      [{'step': 5}]
    """
    path = Path(folder) / METRICS_FILE
    rows: list[Row] = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that its name never stands for half of it.

    Args:
      path: the file, which is replaced.
      text: what it is to hold.
    """
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text)
    os.replace(unfinished, path)


class Records:
    """The rows of a run, one JSON object a line and, if asked for, as TensorBoard's scalars.

    Each row is written as it comes: what is there stays when the run is interrupted.

    Args:
      folder: the run's folder.
      done: steps done before; rows of later steps, of a run that goes on from there, are dropped.
      tensorboard: whether to write for TensorBoard too.

    Raises:
      ValueError: if TensorBoard is asked for and tensorboardX is not installed.
      OSError: if nothing can be written.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with Records(folder, done=0) as records:
      ...         records.write({"step": 1, "train_loss": 2.5})
      ...     read_rows(folder)
      [{'step': 1, 'train_loss': 2.5}]
    """

    def __init__(self, folder: str | Path, *, done: int, tensorboard: bool = False) -> None:
        self._board: Any = _board(Path(folder), done) if tensorboard else None
        self.rows = [row for row in read_rows(folder) if row["step"] <= done]
        path = Path(folder) / METRICS_FILE
        write_whole(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._file = path.open("a")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, row: Row) -> None:
        """Write a row.

        Args:
          row: with the steps done as `step`.

        Raises:
          OSError: if it cannot be written.
        """
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self.rows.append(row)
        if self._board is not None:
            for name, value in row.items():
                self._board.add_scalar(name, value, int(row["step"]))


def _board(folder: Path, done: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "config.tensorboard needs tensorboardX: pip install 'osa_jax[tensorboard]', or leave it out; "
            f"{METRICS_FILE} is always written."
        ) from error
    return SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=done + 1)
