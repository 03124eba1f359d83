"""Kills a training run again and again, resumes it, and compares with a run left alone.

    python -m tests.kill --kills=20

Both runs are real processes on the digits, with dropout and a moving average. The last checkpoints
have to be the same bit for bit, and the rows of metrics but for their timings.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from tests.helpers import ROOT

EVERY = 20
SMALL = [
    f"--config={ROOT}/configs/digits.py:vit",
    "--config.model.depth=1",
    "--config.model.width=8",
    "--config.model.num_heads=2",
    "--config.model.dropout_rate=0.1",
    "--config.ema_decay=0.9",
    "--config.batch_size=8",
    "--config.optimizer.name=adamw",  # Compiles faster.
    "--config.eval_every=30",
    f"--config.checkpoint.every={EVERY}",
]
TIMINGS = {"steps_per_second", "examples_per_second"}


def start(workdir, *flags):
    """The training program in a process of its own, which finds earlier compilations."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    program = [sys.executable, str(ROOT / "experiments" / "train.py"), f"--workdir={workdir}"]
    return subprocess.Popen(
        [*program, *SMALL, *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_ENABLE_X64": "0"} | cache,
    )


def finish(process):
    """Wait for a process that has to succeed; what it wrote to standard error."""
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return err


def saved_steps(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit())


def wait_for_step(workdir, step, process, seconds=120):
    """Wait for a checkpoint of a step or a later one."""
    deadline = time.monotonic() + seconds
    while not any(saved >= step for saved in saved_steps(workdir)):
        assert process.poll() is None and time.monotonic() < deadline, f"step {step} was not saved"
        time.sleep(0.005)


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()


def arrays(workdir):
    """The arrays of the last checkpoint by name, read without the trainer."""
    import orbax.checkpoint as ocp

    folder = workdir / "checkpoints" / str(saved_steps(workdir)[-1]) / "state"
    found = {}
    for name, array in ocp.StandardCheckpointer().restore(folder.absolute()).items():
        typed = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
        found[name] = np.asarray(jax.random.key_data(array) if typed else array)
    return found


def rows(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMINGS} for line in lines]


def assert_same(workdir, other):
    assert rows(workdir) == rows(other)
    ours, theirs = arrays(workdir), arrays(other)
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype and array.tobytes() == theirs[name].tobytes(), name


def kill_and_resume(workdir, kills, num_steps, seed=0):
    """Kill a run at random moments, one in four while it starts; the steps saved by each moment."""
    moments, draw = [], random.Random(seed)
    for index in range(kills):
        before = max(saved_steps(workdir), default=0)
        process = start(workdir, f"--config.num_steps={num_steps}", "--resume")
        if index % 4 == 3:
            time.sleep(draw.uniform(0, 8))
        else:
            wait_for_step(workdir, before + EVERY, process)
            time.sleep(draw.uniform(0, 0.4))
        assert process.poll() is None, "the run is over: take more steps"
        kill(process)
        moments.append(max(saved_steps(workdir), default=0))
    return moments


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        alone, killed = Path(folder, "alone"), Path(folder, "killed")
        finish(start(alone, f"--config.num_steps={options.steps}"))
        print(f"Left alone: {len(rows(alone))} rows.", flush=True)
        print("Killed after:", *kill_and_resume(killed, options.kills, options.steps), flush=True)
        finish(start(killed, f"--config.num_steps={options.steps}", "--resume"))
        assert_same(killed, alone)
        print(f"{options.kills} kills: {len(arrays(alone))} arrays and {len(rows(alone))} rows are the same.")


if __name__ == "__main__":
    main()
