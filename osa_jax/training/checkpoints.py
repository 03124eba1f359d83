"""Checkpoints of a run: the whole snapshot, the newest few and the best, with Orbax."""

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax

from osa_jax.training.loop import Moment, Snapshot
from osa_jax.training.state import TrainState

METRIC = "test_accuracy"


class Best(NamedTuple):
    """The step and the metric of the best checkpoint so far."""

    step: int
    metric: float


class Checkpoints:
    """The checkpoints in a folder, as a context manager.

    One is written in the background, into a folder of another name that is renamed when it is
    complete: a run that is killed at any moment leaves only complete checkpoints under their names.
    It holds the `TrainState`, random keys with their types, the metrics since the last row, and which
    checkpoint is the best: the one with the highest test accuracy in its own step's row.

    Args:
      folder: where the checkpoints are, one folder a step.
      like: the shapes and dtypes of the state, see `Trainer.abstract_state`.
      keep: the number of newest checkpoints to keep; the best is kept besides.
      read_only: whether nothing in the folder may change, for a run that may still be going on.
      warn: called with a line about every checkpoint that cannot be read.

    Example:
      See `osa_jax.training.run`.
    """

    def __init__(
        self,
        folder: Path,
        like: TrainState,
        *,
        keep: int = 1,
        read_only: bool = False,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        import orbax.checkpoint as ocp

        self.best: Best | None = None
        self._like = like
        self._keep = keep
        self._warn = warn
        self._orbax = ocp
        with _failures_named(f"checkpoints {str(folder)!r} cannot be opened"):
            self._manager = ocp.CheckpointManager(
                folder.absolute(),
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=self, cleanup_tmp_directories=not read_only, read_only=read_only
                ),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            with contextlib.suppress(Exception):
                self._manager.close()

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints, the newest last."""
        return sorted(self._manager.all_steps())

    def save(self, moment: Moment) -> None:
        """Start to write a checkpoint of a moment, when the one before is written.

        Args:
          moment: the run after the step to save.

        Raises:
          OSError: if this or an earlier checkpoint could not be written.
        """
        step, state, window = moment.snapshot
        if moment.row is not None and (self.best is None or moment.row[METRIC] > self.best.metric):
            self.best = Best(step, moment.row[METRIC])
        args = self._orbax.args
        with _failures_named(f"the checkpoint of step {step} (or the one before it) could not be written"):
            self._manager.save(
                step,
                args=args.Composite(
                    state=args.StandardSave(_by_name(state)),
                    run=args.JsonSave({"window": jax.tree.map(float, jax.device_get(window)), "best": self.best}),
                ),
            )

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
          OSError: if a checkpoint could not be written.
        """
        with _failures_named("the last checkpoint could not be written"):
            self._manager.wait_until_finished()

    def restore(self, step: int) -> Snapshot:
        """Read the checkpoint of a step.

        Args:
          step: one of `steps`.

        Returns:
          The snapshot; `best` becomes what it was then.

        Raises:
          OSError: if it cannot be read.
        """
        args = self._orbax.args
        target = args.StandardRestore(_by_name(self._like))
        with _failures_named(f"the checkpoint of step {step} cannot be read"):
            found = self._manager.restore(step, args=args.Composite(state=target, run=args.JsonRestore()))
            best, window = found.run["best"], found.run["window"]
        leaves = [found.state[name] for name in _by_name(self._like)]
        state = jax.tree.unflatten(jax.tree.structure(self._like), leaves)
        self.best = best and Best(*best)
        return Snapshot(step, state, window)

    def restore_newest(self) -> Snapshot | None:
        """Read the newest readable checkpoint; warn of newer ones and put them aside.

        Returns:
          The snapshot, or None where no checkpoint can be read.
        """
        for step in reversed(self.steps):
            try:
                return self.restore(step)
            except OSError as error:
                folder = Path(self._manager.directory) / str(step)
                aside = folder.with_name(f"{step}.unreadable")
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
                self._manager.reload()
                self._warn(f"{error}; it is put aside as {aside.name}.")
        return None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax's question which checkpoints to keep."""
        newest = {info.step for info in checkpoints[-self._keep :]}
        return [info.step in newest or (self.best is not None and info.step == self.best.step) for info in checkpoints]


def _by_name(state: TrainState) -> dict[str, Any]:
    """The leaves by their path: a flat dict comes back from the file as what it was."""
    leaves, _ = jax.tree.flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


@contextlib.contextmanager
def _failures_named(what: str) -> Iterator[None]:
    """Whatever goes wrong inside becomes an OSError of one line."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OSError(f"{what}: {reason}") from error
