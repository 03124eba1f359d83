"""A run on disk: its folder, its config, its rows of metrics and its checkpoints."""

import contextlib
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from osa_jax.training.checkpoints import Checkpoints
from osa_jax.training.loop import Row, Snapshot, Trainer
from osa_jax.training.progress import RunProgress
from osa_jax.training.records import CONFIG_FILE, METRICS_FILE, Records, write_whole

CHECKPOINT_FOLDER = "checkpoints"

FREE_KEYS = ("num_steps", "epochs", "eval_every", "eval_batch_size", "checkpoint", "tensorboard", "data.dir")
"""Keys of a config that may change when a run goes on; a longer run follows its own schedule from there."""


class Terminated(Exception):
    """A run was told to stop by SIGTERM, and is saved."""


def prepare_workdir(workdir: str | Path, *, resume: bool = False) -> Path:
    """Make the folder of a run.

    Args:
      workdir: the folder; its parents are made too.
      resume: whether it may hold a run already.

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
    if not resume and any((folder / name).exists() for name in (METRICS_FILE, CONFIG_FILE, CHECKPOINT_FOLDER)):
        raise ValueError(
            f"workdir {str(folder)!r} already holds a run: choose another folder, remove it, or go on with resume."
        )
    return folder


def run(
    trainer: Trainer, *, seed: int, workdir: str | Path, label: str = "training", resume: bool = False
) -> list[Row]:
    """Train from one seed, with a progress bar, and keep everything about it in a folder.

    `config.json` holds the config, `metrics.jsonl` one JSON object a row, `checkpoints` the newest
    few snapshots and the best. A run that goes on from its newest checkpoint does as if it had
    never stopped: rows of later steps are dropped and written again, the same but for their timings.

    Args:
      trainer: what to train.
      seed: the seed of this run, in place of the config's.
      workdir: a folder that holds no run yet.
      label: the run's name beside the progress bar.
      resume: whether to go on with the run in the folder; from the start, with a warning, where
        there is no checkpoint that can be read.

    Returns:
      The rows, see `Trainer.steps`.

    Raises:
      ValueError: if the folder holds a run, cannot be written, or holds one of another config.
      OSError: if a checkpoint or a row could not be written.
      FloatingPointError: naming the first step that was not finite.
      Terminated: after SIGTERM, when the run is saved.
    """
    folder = prepare_workdir(workdir, resume=resume)
    config = trainer.config.to_dict() | {"seed": seed}
    if resume:
        _check_same(folder, config)
    settings = trainer.config.checkpoint
    with (
        _sigterm_noted() as told_to_stop,
        Checkpoints(folder / CHECKPOINT_FOLDER, trainer.abstract_state, keep=settings.keep, warn=_warn) as checkpoints,
    ):
        start = _newest(checkpoints, folder, trainer.num_steps) if resume else None
        done = start.step if start else 0
        write_whole(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        with (
            Records(folder, done=done, tensorboard=trainer.config.tensorboard) as records,
            RunProgress(label, trainer.num_steps, done=done) as progress,
        ):
            for moment in trainer.steps(seed, start=start):
                step = moment.snapshot.step
                progress.on_step(step, moment.metrics)
                if moment.row is not None:
                    records.write(moment.row)
                stop = told_to_stop.is_set() and step < trainer.num_steps
                if stop or step % settings.every == 0 or step == trainer.num_steps:
                    checkpoints.save(moment)
                if stop:
                    checkpoints.wait()
                    raise Terminated(f"Terminated: step {step} is saved, resume goes on from there.")
    return records.rows


def load_run(workdir: str | Path, *, best: bool = True) -> tuple[Trainer, Snapshot]:
    """Read a run's config and one of its checkpoints, and change nothing.

    Args:
      workdir: the run's folder.
      best: whether to take the checkpoint with the highest test accuracy, instead of the newest.

    Returns:
      The trainer of its config, and the snapshot.

    Raises:
      ValueError: if there is no run or no checkpoint.
      OSError: if the checkpoint cannot be read.
    """
    folder = Path(workdir)
    config = _read_config(folder)
    if config is None or not (folder / CHECKPOINT_FOLDER).is_dir():
        raise ValueError(f"workdir {str(folder)!r} holds no run with checkpoints: train one there first.")
    trainer = Trainer(ConfigDict(config))
    with Checkpoints(folder / CHECKPOINT_FOLDER, trainer.abstract_state, read_only=True) as checkpoints:
        if not checkpoints.steps:
            raise ValueError(f"workdir {str(folder)!r} holds no complete checkpoint yet: train longer, or resume.")
        snapshot = checkpoints.restore(checkpoints.steps[-1])
        if best and checkpoints.best is not None and checkpoints.best.step != snapshot.step:
            snapshot = checkpoints.restore(checkpoints.best.step)
    return trainer, snapshot


def _newest(checkpoints: Checkpoints, folder: Path, num_steps: int) -> Snapshot | None:
    start = checkpoints.restore_newest()
    if start is None:
        _warn(f"workdir {str(folder)!r} holds no checkpoint that can be read; the run starts anew.")
    elif start.step > num_steps:
        raise ValueError(
            f"workdir {str(folder)!r} holds a run of {start.step} steps, more than the {num_steps} of the config: "
            "lengthen it."
        )
    return start


def _check_same(folder: Path, config: Mapping[str, Any]) -> None:
    """Compare with the config of the run in the folder, if there is one."""
    before = _read_config(folder)
    if before is None:
        if (folder / METRICS_FILE).exists() or any((folder / CHECKPOINT_FOLDER).glob("[0-9]*")):
            raise ValueError(f"workdir {str(folder)!r} holds a run without {CONFIG_FILE}: choose another folder.")
        return
    old, new = _flat(before), _flat(json.loads(json.dumps(config)))
    for key in sorted(old.keys() | new.keys()):
        free = any(key == name or key.startswith(name + ".") for name in FREE_KEYS)
        if not free and old.get(key) != new.get(key):
            raise ValueError(
                f"config.{key} is {new.get(key)!r}, but the run in workdir {str(folder)!r} has {old.get(key)!r}: "
                "resume with the same config, or choose another folder."
            )


def _read_config(folder: Path) -> dict[str, Any] | None:
    path = folder / CONFIG_FILE
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no config ({error}): choose another folder.") from error


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _warn(line: str) -> None:
    print(f"Warning: {line}", file=sys.stderr)


@contextlib.contextmanager
def _sigterm_noted() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, instead of ending the process; only the main thread may ask."""
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)
