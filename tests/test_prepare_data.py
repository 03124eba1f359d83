"""experiments/prepare_data.py: what it writes, and one line for everything that can go wrong."""

import hashlib
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from osa_jax.data import SOURCES
from tests.idx_writer import write_folder, write_idx

ROOT = Path(__file__).parents[1]

pytest.importorskip("tensorflow_datasets")
from experiments.prepare_data import download  # noqa: E402


def execute(*arguments, temporary):
    result = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "prepare_data.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
    )
    return result.returncode, result.stdout, result.stderr


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_it_prepares_from_idx_files_and_never_overwrites(tmp_path):
    splits = write_folder(tmp_path / "idx", suffix=".gz")
    arguments = ["--name=fashion_mnist", f"--data_dir={tmp_path}/out", f"--idx_dir={tmp_path}/idx"]
    code, out, err = execute(*arguments, temporary=tmp_path)
    assert code == 0, err
    assert out.splitlines()[-1] == (f"Use it with --config.data.name=fashion_mnist --config.data.dir={tmp_path}/out")
    dataset = SOURCES["fashion_mnist"](dir=f"{tmp_path}/out")
    np.testing.assert_array_equal(dataset.train.labels, splits["train"][1])
    pixels = 255 * (dataset.test.images[..., 0] * dataset.std + dataset.mean)
    np.testing.assert_allclose(pixels, splits["test"][0], atol=1e-3)

    before = contents(tmp_path / "out")
    code, out, err = execute(*arguments, temporary=tmp_path)
    assert code == 1 and f"Error: {tmp_path}/out/fashion_mnist/3.0.1 is already there" in err.splitlines()[-1]
    assert contents(tmp_path / "out") == before


def truncated(folder):
    path = folder / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-100])
    return "idx/t10k-images-idx3-ubyte is truncated"


def unwritable(folder):
    (folder.parent / "out").write_text("a file where the folder should be")
    return "out cannot be written: Not a directory."


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [truncated, unwritable])
def test_what_is_wrong_is_said_in_one_line(tmp_path, spoil):
    write_folder(tmp_path / "idx")
    message = spoil(tmp_path / "idx")
    before = contents(tmp_path)
    code, _, err = execute(f"--data_dir={tmp_path}/out", f"--idx_dir={tmp_path}/idx", temporary=tmp_path)
    last = err.splitlines()[-1]
    assert code == 1 and last.startswith("Error: ") and message in last and "Traceback" not in err
    assert contents(tmp_path) == before


def url_infos(path, *, checksum=None):
    """TFDS's table of downloads, for a file on this machine."""
    content = path.read_bytes()
    checksum = checksum or hashlib.sha256(content).hexdigest()
    return {path.as_uri(): types.SimpleNamespace(size=len(content), checksum=checksum, filename="labels.gz")}


def test_download_keeps_what_has_the_known_sum(tmp_path):
    source = write_idx(tmp_path / "source.gz", [1, 2, 3])
    download(url_infos(source), tmp_path)
    assert (tmp_path / "labels.gz").read_bytes() == source.read_bytes()


def test_download_refuses_what_has_another_sum_or_does_not_come(tmp_path):
    source = write_idx(tmp_path / "source.gz", [1, 2, 3])
    with pytest.raises(ValueError, match="source.gz has not the content that TFDS knows: .* set --idx_dir"):
        download(url_infos(source, checksum="0" * 64), tmp_path)
    infos = url_infos(source)
    source.unlink()
    with pytest.raises(ValueError, match="source.gz cannot be downloaded .*No such file.* set --idx_dir"):
        download(infos, tmp_path)
    assert not (tmp_path / "labels.gz").exists()
