"""The programs as a user runs them: in a process of their own, from the command line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from osa_jax.training import FIGURE_1, SYSTEMS

ROOT = Path(__file__).parents[1]
TINY = [
    "--config.model.depth=1",
    "--config.model.width=16",
    "--config.model.num_heads=2",
    "--config.batch_size=8",
]


def command(program, *arguments):
    return [sys.executable, str(ROOT / "experiments" / program), *map(str, arguments)]


def start(program, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.Popen(
        command(program, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def execute(program, *arguments):
    process = start(program, *arguments)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_compare_smoke_writes_table_figure_and_every_run(tmp_path):
    code, out, err = execute(
        "compare.py",
        f"--config={ROOT}/configs/digits.py",
        f"--workdir={tmp_path}/a",
        "--smoke",
        *TINY,
    )
    assert code == 0, err
    table = (tmp_path / "a" / "results.md").read_text()
    assert table in out and f"{tmp_path}/a/curves.png" in out
    lines = table.splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == [f"| {SYSTEMS[name].label}" for name in FIGURE_1]
    assert (tmp_path / "a" / "curves.png").read_bytes().startswith(b"\x89PNG")
    for name, line in zip(FIGURE_1, lines, strict=True):
        folder = tmp_path / "a" / name / "seed0"
        rows = rows_of(folder / "metrics.jsonl")
        assert [row["step"] for row in rows] == [2, 4]
        assert f"| {100 * rows[-1]['test_accuracy']:.1f} |" in line
        model = json.loads((folder / "config.json").read_text())["model"]
        assert model["depth"] == 1 and SYSTEMS[name].model.items() <= model.items()


@pytest.mark.slow
def test_train_trains_and_refuses_to_overwrite(tmp_path):
    arguments = [
        f"--config={ROOT}/configs/digits.py:osa",
        f"--workdir={tmp_path}/run",
        "--config.num_steps=60",
        "--config.eval_every=30",
        "--config.optimizer.learning_rate=0.01",
        *TINY,
    ]
    code, out, err = execute("train.py", *arguments)
    assert code == 0, err
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [30, 60]
    assert rows[1]["test_loss"] < rows[0]["test_loss"] < 2.3
    assert f"Test accuracy {100 * rows[1]['test_accuracy']:.1f} %" in out
    assert "step 60/60, loss" in err
    code, out, err = execute("train.py", *arguments)
    assert code == 1 and re.search(r"^Error: workdir .*/run' already holds a run", err, re.M)
    assert rows_of(tmp_path / "run" / "metrics.jsonl") == rows


@pytest.mark.parametrize(
    "override, message",
    [
        ("--config.model.widht=3", "widht"),
        ("--config.model.width=wide", "wide"),
        ("--config.model.width=-16", "width must be .*-16"),
        ("--config.eval_every=0", "config.eval_every must be at least 1, got 0"),
        ("--config.optimizer.warmup_steps=600", r"warmup_steps .* got 600"),
    ],
)
def test_a_wrong_override_ends_at_once_with_the_key(override, message, tmp_path):
    code, _, err = execute("train.py", f"--config={ROOT}/configs/digits.py", f"--workdir={tmp_path}/run", override)
    assert code == 1 and re.search(message, err)
    assert "step 1" not in err and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ctrl_c_keeps_the_metrics(tmp_path):
    process = start(
        "train.py",
        f"--config={ROOT}/configs/digits.py:vit",
        f"--workdir={tmp_path}/run",
        "--config.num_steps=1000000",
        "--config.eval_every=5",
        *TINY,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "Interrupted: the metrics written so far are kept."
    assert "Traceback" not in err
    assert rows_of(metrics)[0]["step"] == 5
