"""A run that stops and goes on is the run that never stopped; what stops it, and what is refused."""

import json
import shutil
import signal
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from osa_jax.data import Dataset, Split
from osa_jax.training import Checkpoints, Records, Terminated, Trainer, load_run, read_rows, run
from osa_jax.training.progress import RunProgress
from tests.helpers import run_python
from tests.kill import arrays, assert_same, saved_steps


class Dropped(nnx.Module):
    """Softmax regression behind dropout, which holds a typed key and a counter."""

    def __init__(self, *, rngs, image_shape, num_classes):
        self.out = nnx.Linear(int(np.prod(image_shape)), num_classes, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, images, *, deterministic):
        return self.out(self.dropout(images.reshape(len(images), -1), deterministic=deterministic))


def config(**changes):
    values = {
        "seed": 0,
        "num_steps": 6,
        "batch_size": 4,
        "eval_batch_size": 5,
        "eval_every": 2,
        "ema_decay": 0.5,
        "data": {"name": "random"},
        "model": {"name": "dropped"},
        "optimizer": {"learning_rate": 0.05, "warmup_steps": 2},
        "checkpoint": {"every": 3, "keep": 2},
    }
    return ConfigDict(values | changes)


@pytest.fixture(scope="module", autouse=True)
def world():
    """One model and one data set."""

    def split(size, seed):
        rng = np.random.default_rng(seed)
        return Split(rng.normal(size=(size, 2, 2, 1)).astype(np.float32), rng.integers(3, size=size, dtype=np.int32))

    def make_dropped(*, image_shape, num_classes, rngs):
        return Dropped(image_shape=image_shape, num_classes=num_classes, rngs=rngs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules["osa_jax.data"].SOURCES, "random", lambda: Dataset(split(13, 1), split(40, 2), 3))
        patch.setitem(sys.modules["osa_jax.models"].MODELS, "dropped", make_dropped)
        yield


@pytest.fixture(scope="module")
def trainer(world):
    return Trainer(config())


@pytest.fixture(scope="module")
def whole(trainer, tmp_path_factory):
    """A run of six steps that nothing interrupted, with checkpoints after 3 and 6."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(trainer, seed=3, workdir=folder)
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def leaves(state):
    typed = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.array(jax.random.key_data(leaf) if typed(leaf) else leaf) for leaf in jax.tree.leaves(state)]


def test_three_steps_and_three_more_are_six_bit_for_bit(trainer, whole, copy):
    shutil.rmtree(copy / "checkpoints" / "6")
    rows = run(trainer, seed=3, workdir=copy, resume=True)
    assert [row["step"] for row in rows] == [2, 4, 6] and rows == read_rows(copy)
    assert_same(copy, whole)
    # The numbers were there to differ: dropout, the average and the window of step 3 all matter.
    assert rows[1] != rows[2] and not np.array_equal(
        arrays(whole)["params.out.kernel.value"], arrays(whole)["ema.out.kernel.value"]
    )


def test_a_checkpoint_is_the_whole_state_with_every_type(trainer, tmp_path):
    for moment in trainer.steps(3):
        if moment.snapshot.step == 3:
            break
    with Checkpoints(tmp_path / "c", trainer.abstract_state, keep=1) as checkpoints:
        checkpoints.save(moment)
        before = leaves(moment.snapshot.state)
        window = [{name: float(value) for name, value in metrics.items()} for metrics in moment.snapshot.window]
        # The next step takes the state's memory while the checkpoint is still being written.
        state, _ = trainer.functions.train_step(
            moment.snapshot.state, trainer.dataset.train.images[:4], trainer.dataset.train.labels[:4]
        )
        jax.block_until_ready(state)
        checkpoints.wait()
        restored = checkpoints.restore(3)
    assert restored.step == int(restored.state.step) == 3 and restored.window == window and len(window) == 1
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    for got, true in zip(leaves(restored.state), before, strict=True):
        assert got.dtype == true.dtype and got.tobytes() == true.tobytes()
    assert restored.state.key.dtype == jax.random.key(0).dtype
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(restored.state.rest)}
    assert kinds == {"key<fry>", "uint32"}


DAMAGES = {
    "empty": lambda step: [path.unlink() if path.is_file() else shutil.rmtree(path) for path in step.iterdir()],
    "metrics cut off": lambda step: cut(step / "run" / "metadata"),
    "arrays cut off": lambda step: [cut(path) for path in (step / "state").rglob("*") if path.is_file()],
    "no arrays": lambda step: shutil.rmtree(step / "state"),
}


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_checkpoint_is_put_aside_and_the_one_before_used(damage, trainer, whole, copy, capsys):
    DAMAGES[damage](copy / "checkpoints" / "6")
    leftover = copy / "checkpoints" / "9.orbax-checkpoint-tmp-123"
    leftover.mkdir()
    run(trainer, seed=3, workdir=copy, resume=True)
    assert "Warning: the checkpoint of step 6 cannot be read: " in capsys.readouterr().err
    assert_same(copy, whole)
    assert (copy / "checkpoints" / "6.unreadable").exists() and not leftover.exists()


def test_without_a_readable_checkpoint_the_run_starts_anew_and_says_so(trainer, whole, copy, capsys):
    for step in (3, 6):
        DAMAGES["arrays cut off"](copy / "checkpoints" / str(step))
    run(trainer, seed=3, workdir=copy, resume=True)
    err = capsys.readouterr().err
    assert "step 3 cannot be read" in err and "no checkpoint that can be read; the run starts anew" in err
    assert_same(copy, whole)


def test_a_finished_run_has_nothing_to_resume(trainer, copy):
    before = {path: path.stat().st_mtime_ns for path in (copy / "checkpoints").rglob("*")}
    assert run(trainer, seed=3, workdir=copy, resume=True) == read_rows(copy)
    assert {path: path.stat().st_mtime_ns for path in (copy / "checkpoints").rglob("*")} == before


@pytest.mark.parametrize(
    "changes, seed, message",
    [
        ({"optimizer": {"learning_rate": 0.1, "warmup_steps": 2}}, 3, "config.optimizer.learning_rate is 0.1, .* 0.05"),
        ({"ema_decay": None}, 3, "config.ema_decay is None, .* has 0.5"),
        ({}, 4, "config.seed is 4, .* has 3: resume with the same config, or choose another folder"),
        ({"num_steps": 5}, 3, "a run of 6 steps, more than the 5"),
    ],
)
def test_another_config_is_refused_by_its_key_and_nothing_is_touched(changes, seed, message, copy):
    def contents():
        return {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}

    before = contents()
    with pytest.raises(ValueError, match=message):
        run(Trainer(config(**changes)), seed=seed, workdir=copy, resume=True)
    assert contents() == before


def test_a_run_may_become_longer(copy):
    rows = run(Trainer(config(num_steps=8, checkpoint={"every": 4})), seed=3, workdir=copy, resume=True)
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert json.loads((copy / "config.json").read_text())["num_steps"] == 8


def test_a_folder_without_its_config_is_refused(trainer, copy):
    (copy / "config.json").unlink()
    with pytest.raises(ValueError, match="holds a run without config.json"):
        run(trainer, seed=3, workdir=copy, resume=True)


def test_sigterm_saves_and_the_run_goes_on_from_there(trainer, whole, tmp_path, monkeypatch):
    handler = signal.getsignal(signal.SIGTERM)
    on_step = RunProgress.on_step

    def terminated_at_4(self, step, metrics):
        on_step(self, step, metrics)
        if step == 4:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(RunProgress, "on_step", terminated_at_4)
    with pytest.raises(Terminated, match="step 4 is saved"):
        run(trainer, seed=3, workdir=tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) is handler
    assert saved_steps(tmp_path / "run") == [3, 4]
    monkeypatch.undo()
    run(trainer, seed=3, workdir=tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", whole)


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path):
    settings = {"num_steps": 12, "eval_every": 1, "checkpoint": {"every": 1, "keep": 2}}
    best_trainer = Trainer(config(**settings))
    rows = run(best_trainer, seed=2, workdir=tmp_path)
    accuracies = [row["test_accuracy"] for row in rows]
    best = 1 + int(np.argmax(accuracies))
    assert best < 11 and saved_steps(tmp_path) == [best, 11, 12]
    loaded, snapshot = load_run(tmp_path)
    assert snapshot.step == best and loaded.config.to_dict() == best_trainer.config.to_dict() | {"seed": 2}
    assert load_run(tmp_path, best=False)[1].step == 12


FULL = """
import resource, signal, sys
from experiments import train
from osa_jax.training import run_program
from tests.kill import SMALL

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
sys.argv = ["train.py", "--workdir={workdir}", *SMALL, "--config.num_steps=40"]
run_program(train.main)
"""


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path):
    """No file may grow beyond 3,000 bytes, as on a full disk: one line, and no trace of any thread."""
    result = run_python(FULL.format(workdir=tmp_path / "run"))
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr and "ignored" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert "checkpoint" in line and "could not be written: " in line
    assert saved_steps(tmp_path / "run") == []


def test_load_run_refuses_what_is_no_run(tmp_path, copy):
    with pytest.raises(ValueError, match="holds no run with checkpoints"):
        load_run(tmp_path)
    for step in (3, 6):
        shutil.rmtree(copy / "checkpoints" / str(step))
    with pytest.raises(ValueError, match="holds no complete checkpoint yet"):
        load_run(copy)


def test_rows_of_later_steps_and_a_broken_line_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "a": 0.1}\n{"step": 4, "a": 0.2}\n{"step": 6, "a": 0.')
    with Records(tmp_path, done=3) as records:
        records.write({"step": 4, "a": 0.3})
        assert records.rows == read_rows(tmp_path) == [{"step": 2, "a": 0.1}, {"step": 4, "a": 0.3}]


def test_tensorboard_gets_the_rows(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    with Records(tmp_path, done=0, tensorboard=True) as records:
        records.write({"step": 5, "test_loss": 0.25})
    (path,) = (tmp_path / "tensorboard").iterdir()
    data, values = path.read_bytes(), {}
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        values |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
        data = data[16 + length :]
    assert values == {(5, "step"): 5.0, (5, "test_loss"): 0.25}


def test_tensorboard_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        ValueError, match=r"config.tensorboard needs tensorboardX: pip install 'osa_jax\[tensorboard\]'"
    ):
        Records(tmp_path, done=0, tensorboard=True)
