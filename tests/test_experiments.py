"""The programs as a user runs them: in a process of their own, from the command line."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from osa_jax.training import SYSTEMS, load_run
from tests import kill
from tests.helpers import ROOT

TINY = [
    "--config.model.depth=1",
    "--config.model.width=16",
    "--config.model.num_heads=2",
    "--config.batch_size=8",
    "--config.optimizer.name=adamw",  # Compiles faster.
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
def test_compare_writes_table_figure_page_and_runs_and_resumes_with_what_is_missing(tmp_path):
    arguments = ["compare.py", f"--config={ROOT}/configs/digits.py", f"--workdir={tmp_path}/a", "--smoke", *TINY]
    code, out, err = execute(*arguments, "--systems=vit,osa")
    assert code == 0, err
    metrics = tmp_path / "a" / "vit" / "seed0" / "metrics.jsonl"
    before = metrics.read_bytes()
    code, out, err = execute(*arguments, "--systems=vit,osa")
    assert code == 1 and re.search(r"^Error: workdir .*/a/vit/seed0' already holds a run", err, re.M)

    shutil.rmtree(tmp_path / "a" / "osa")
    code, out, err = execute(*arguments, "--systems=vit,osa,e_spa", "--resume")
    assert code == 0 and "Warning" not in err, err
    assert metrics.read_bytes() == before  # timings and all: not run again
    table = (tmp_path / "a" / "results.md").read_text()
    assert table in out and f"{tmp_path}/a/curves.png" in out
    lines = table.splitlines()[2:]
    assert (tmp_path / "a" / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a" / "report.html").read_text()
    for name, line in zip(("vit", "osa", "e_spa"), lines, strict=True):
        assert line.split(" | ")[0] == f"| {SYSTEMS[name].label}" and f"<td>{SYSTEMS[name].label}</td>" in page
        folder = tmp_path / "a" / name / "seed0"
        rows = rows_of(folder / "metrics.jsonl")
        assert [row["step"] for row in rows] == [2, 4]
        assert f"| {100 * rows[-1]['test_accuracy']:.1f} |" in line
        model = json.loads((folder / "config.json").read_text())["model"]
        assert model["depth"] == 1 and SYSTEMS[name].model.items() <= model.items()


@pytest.mark.slow
def test_ablate_trains_every_value_and_rank_collapse_measures_what_was_trained(tmp_path):
    arguments = [
        f"--config={ROOT}/configs/digits.py:osa",
        f"--workdir={tmp_path}/ablate",
        "--axis=alpha",
        "--seeds=1",
        *("--config.num_steps=4", "--config.eval_every=2", "--config.optimizer.warmup_steps=1", *TINY),
    ]
    code, out, err = execute("ablate.py", *arguments, "--values=0.1,wide:fixed")
    assert code == 1 and out == "" and re.fullmatch(r"Error: --values of alpha .*; got 'wide:fixed'.\n", err)
    code, out, err = execute("ablate.py", *arguments, "--values=0.3")
    assert code == 0, err
    folder = tmp_path / "ablate" / "alpha"
    finished = (folder / "0.3" / "seed0" / "metrics.jsonl").read_text()
    code, out, err = execute("ablate.py", *arguments, "--values=0.3,0.2:fixed,0.3:layer", "--resume")
    assert code == 0, err
    # Timings and all: it was not run again.
    assert (folder / "0.3" / "seed0" / "metrics.jsonl").read_text() == finished
    table = (folder / "results.md").read_text()
    lines = table.splitlines()
    assert table in out and lines[0].startswith("| alpha | test accuracy") and len(lines) == 5
    for value, line in zip(("0.3", "0.2:fixed", "0.3:layer"), lines[2:], strict=True):
        rows = rows_of(folder / value.replace(":", "-") / "seed0" / "metrics.jsonl")
        assert line.startswith(f"| {value} | {100 * rows[-1]['test_accuracy']:.1f} |")
    page = (folder / "report.html").read_text()
    assert page.count("<img") == 2 and all((folder / name).exists() for name in ("values.png", "curves.png"))
    alphas = {value: load_run(folder / value / "seed0")[1].state.params for value in ("0.3", "0.2-fixed", "0.3-layer")}
    alphas = {value: params["blocks"][0]["attention"]["alpha"][...] for value, params in alphas.items()}
    assert (alphas["0.2-fixed"] == np.float32(0.2)).all()
    assert alphas["0.3"].shape == (2,) and alphas["0.3-layer"].shape == ()
    assert (abs(alphas["0.3"] - 0.3) > 1e-4).all() and (abs(alphas["0.3"] - 0.3) < 0.1).all()

    code, out, err = execute(
        "rank_collapse.py",
        *(f"--config={ROOT}/configs/digits.py", f"--workdir={tmp_path}/refused", "--depths="),
        f"--trained={folder}/0.3/seed0,{folder}/0.2-fixed/seed0",
    )
    assert code == 1 and out == "" and "Error: --trained has two models called 'OSA, exact'" in err
    code, out, err = execute(
        "rank_collapse.py",
        f"--config={ROOT}/configs/digits.py",
        *(f"--workdir={tmp_path}/collapse", "--systems=vit,osa", "--depths=2", "--seeds=1", "--images=3", *TINY[1:]),
        f"--trained={folder}/0.3/seed0,{folder}/0.3/seed0",
    )
    assert code == 0, err
    table = (tmp_path / "collapse" / "rank_collapse.md").read_text()
    assert table in out
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    names = [["ViT", "depth 2"], ["OSA, exact", "depth 2"], ["OSA, exact", "depth 1, trained"]]
    assert [line[:2] for line in cells] == names and err.splitlines()[-1] == "depth 1, trained: OSA, exact"
    assert all(1 < float(rank) < 16 for line in cells for rank in line[2:4])
    assert 90 < float(cells[1][4]) < 110  # Theorem 2.2, but for the two heads.
    for name in ("rank_collapse.png", "spectra.png"):
        assert (tmp_path / "collapse" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_train_trains_and_refuses_to_overwrite_and_its_model_is_evaluated_and_predicts(tmp_path):
    arguments = [
        f"--config={ROOT}/configs/digits.py:vit",
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
    accuracy = 100 * rows[1]["test_accuracy"]
    assert re.search(rf"Test accuracy +{accuracy:.1f} % \(best ", out) and f"{tmp_path}/run" in out
    assert "step 60/60, loss" in err
    code, out, err = execute("train.py", *arguments)
    assert code == 1 and re.search(r"^Error: workdir .*/run' already holds a run", err, re.M)
    assert rows_of(tmp_path / "run" / "metrics.jsonl") == rows

    code, out, err = execute("evaluate.py", f"--workdir={tmp_path}/run", f"--figure={tmp_path}/c.png")
    assert code == 0, err
    assert f"test loss {rows[1]['test_loss']:.4f}, test accuracy {accuracy:.2f} %" in out
    table = [re.findall(r"\d+(?= )|·", line)[1:11] for line in out.splitlines() if line.startswith("│")]
    counts = [[int(cell.replace("·", "0")) for cell in line] for line in table]
    assert sum(map(sum, counts)) == 360
    assert sum(counts[i][i] for i in range(10)) == round(3.6 * accuracy)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")

    from PIL import Image
    from sklearn.datasets import load_digits

    pixels = 255 - load_digits().images[0] * 255 / 16
    Image.fromarray(pixels.astype("uint8")).resize((64, 80)).save(tmp_path / "zero.png")
    picture, figure = tmp_path / "zero.png", tmp_path / "p.png"
    code, out, err = execute("predict.py", f"--workdir={tmp_path}/run", f"--figure={figure}", "--invert", picture)
    assert code == 0, err
    assert re.search(r"zero.png: 0 \(\d+\.\d %\), else \d", out)
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "config, override, message",
    [
        ("digits.py", "--config.optimizer.learning_rat=1", "config.optimizer.learning_rat .*mean 'learning_rate'"),
        ("digits.py", "--config.optimiser.learning_rate=1", "config.optimiser .*mean 'optimizer'"),
        ("digits.py", "--config.model.width=wide", "config.model.width=wide: invalid literal for int"),
        ("digits.py", "--config.model.width=-16", "config.model: width must be .*-16"),
        ("digits.py:vit", "--config.model.qk_features=8", "config.model.qk_features is not supported for overriding"),
        ("digits.py:oas", "--resume", "system must be one of .*'osa'.*, got 'oas'"),
        ("digit.py", "--resume", "No such file or directory: .*configs/digit.py"),
        ("digits.py", "stray", "'stray' is no flag"),
    ],
)
def test_a_wrong_command_line_ends_at_once_with_one_line(config, override, message, tmp_path):
    code, out, err = execute("train.py", f"--config={ROOT}/configs/{config}", f"--workdir={tmp_path}/run", override)
    assert code == 1 and out == ""
    (line,) = err.splitlines()
    assert re.match(f"Error: .*{message}", line)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_killed_and_terminated_and_resumed_is_the_run_left_alone(tmp_path):
    steps = "--config.num_steps=300"
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    kill.finish(kill.start(alone, steps))
    first, second = kill.kill_and_resume(killed, kills=2, num_steps=300)
    assert 20 <= first < second < 300

    process = kill.start(killed, steps, "--resume")
    kill.wait_for_step(killed, second + kill.EVERY, process)
    process.send_signal(signal.SIGTERM)
    last = kill.finish(process).splitlines()[-1]
    saved = int(re.fullmatch(r"Terminated: step (\d+) is saved, resume goes on from there.", last)[1])
    assert kill.saved_steps(killed)[-1] == saved > second

    kill.finish(kill.start(killed, steps, "--resume"))
    kill.assert_same(killed, alone)


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
    assert err.splitlines()[-1] == "Interrupted: what was written so far is kept."
    assert "Traceback" not in err
    assert rows_of(metrics)[0]["step"] == 5
