"""MNIST and Fashion-MNIST from IDX files and from a prepared folder, and what happens without them."""

import os
import re
import shutil
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from osa_jax.data import SOURCES, Split
from osa_jax.data.prepared import find_prepared, read_prepared
from tests.idx_writer import write_folder, write_idx

ROOT = Path(__file__).parents[1]
REAL = Path(os.environ.get("OSA_JAX_MNIST", ROOT.parent / "shared" / "data" / "mnist"))
NAMES = ["mnist", "fashion_mnist"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError(f"the network was asked for {arguments}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", NAMES)
def test_idx_files_are_standardised_by_the_training_images(tmp_path, name, suffix):
    splits = write_folder(tmp_path, suffix=suffix)
    dataset = SOURCES[name](dir=str(tmp_path))
    assert dataset.num_classes == 10 and dataset.image_shape == (28, 28, 1)
    pixels = splits["train"][0] / 1.0
    mean = pixels.sum() / pixels.size
    std = np.sqrt(((pixels - mean) ** 2).sum() / pixels.size)
    np.testing.assert_allclose([dataset.mean, dataset.std], [mean / 255, std / 255], rtol=1e-12)
    for split, (images, labels) in zip((dataset.train, dataset.test), splits.values(), strict=True):
        assert split.images.dtype == np.float32 and split.labels.dtype == np.int32
        np.testing.assert_allclose(split.images[..., 0], (images - mean) / std, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(split.labels, labels)


def test_a_folder_with_some_of_the_files_names_the_missing_one(tmp_path):
    write_folder(tmp_path)
    missing = tmp_path / "t10k-labels-idx1-ubyte"
    missing.unlink()
    with pytest.raises(ValueError, match=f"^{missing} cannot be read: No such file or directory.$"):
        SOURCES["mnist"](dir=str(tmp_path))


def test_images_without_contrast_are_refused(tmp_path):
    write_folder(tmp_path)
    write_idx(tmp_path / "train-images-idx3-ubyte", np.full((23, 28, 28), 7))
    with pytest.raises(ValueError, match="^every pixel of the training images is 7: "):
        SOURCES["mnist"](dir=str(tmp_path))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["argument", "default"])
def test_a_missing_set_fails_within_a_second_with_the_command(tmp_path, monkeypatch, name, where):
    folder = tmp_path / "empty"
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))
    start = time.monotonic()
    with pytest.raises(ValueError) as error:
        SOURCES[name](dir=str(folder) if where == "argument" else None)
    assert time.monotonic() - start < 1
    message = str(error.value)
    assert message.startswith(f"{name} is not in '{folder}'") and "\n" not in message
    assert f"python experiments/prepare_data.py --name={name} --data_dir={folder}" in message
    assert not folder.exists()


def test_the_default_folder_is_that_of_tfds(monkeypatch):
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    monkeypatch.setenv("HOME", "/no/such/home")
    with pytest.raises(ValueError, match="not in '/no/such/home/tensorflow_datasets'"):
        SOURCES["mnist"]()


# Prepared folders


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A TFDS folder with a small `mnist`, and the arrays it was made of."""
    tfds = pytest.importorskip("tensorflow_datasets")
    from experiments.prepare_data import make_builder

    folder = tmp_path_factory.mktemp("prepared")
    splits = write_folder(folder / "idx")
    raw = {name: Split(images[..., None].astype(np.uint8), labels) for name, (images, labels) in splits.items()}
    make_builder(tfds.builder_cls("mnist"), raw, folder).download_and_prepare()
    return folder, splits


def test_a_prepared_folder_holds_the_same_as_the_files_in_the_same_order(prepared):
    folder, _ = prepared
    from_files = SOURCES["mnist"](dir=str(folder / "idx"))
    from_folder = SOURCES["mnist"](dir=str(folder))
    assert from_files[2:] == from_folder[2:]
    for one, other in zip(from_files[:2], from_folder[:2], strict=True):
        for array, same in zip(one, other, strict=True):
            assert array.dtype == same.dtype
            np.testing.assert_array_equal(array, same)


def test_the_stock_builder_reads_the_prepared_folder(prepared):
    tfds = pytest.importorskip("tensorflow_datasets")
    folder, splits = prepared
    builder = tfds.builder("mnist", data_dir=folder, file_format="array_record")
    assert builder.is_prepared()
    source = tfds.data_source("mnist", data_dir=folder, split="test", download=False)
    np.testing.assert_array_equal([example["label"] for example in source], splits["test"][1])
    np.testing.assert_array_equal(np.stack([example["image"] for example in source])[..., 0], splits["test"][0])


def test_a_set_of_another_name_is_missing(prepared):
    with pytest.raises(ValueError, match="^fashion_mnist is not in "):
        SOURCES["fashion_mnist"](dir=str(prepared[0]))


def truncate(version):
    path = version / "mnist-test.array_record-00000-of-00001"
    path.write_bytes(path.read_bytes()[:70_000])


def remove(version):
    (version / "mnist-test.array_record-00000-of-00001").unlink()


def damage(version):
    (version / "dataset_info.json").write_text('{"name')


def relabel(version):
    info = version / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))


@pytest.mark.parametrize(
    "change, message",
    [
        (truncate, r"cannot be read \(.*\): remove it and prepare the set again"),
        (remove, r"cannot be read \(.*No such file or directory"),
        (damage, r"cannot be read \(Failed to load JSON"),
        (relabel, "is not prepared as array_record, .*: prepare the set in another folder"),
    ],
)
def test_a_damaged_prepared_folder_is_named_in_one_line(tmp_path, prepared, change, message):
    shutil.copytree(find_prepared("mnist", prepared[0]), tmp_path / "mnist" / "3.0.1")
    change(tmp_path / "mnist" / "3.0.1")
    with pytest.raises(ValueError, match=f"^{tmp_path}/mnist/3.0.1 {message}") as error:
        SOURCES["mnist"](dir=str(tmp_path))
    assert "\n" not in str(error.value)


def test_prepared_images_of_another_size_are_refused(prepared):
    with pytest.raises(ValueError, match=re.escape("images of shape (28, 28, 1), expected (8, 8, 1)")):
        read_prepared(find_prepared("mnist", prepared[0]), image_size=(8, 8))


def test_without_tfds_a_prepared_folder_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "mnist" / "3.0.1").mkdir(parents=True)
    (tmp_path / "mnist" / "3.0.1" / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ValueError, match=r"tensorflow_datasets cannot be imported .*'osa_jax\[tfds\]'"):
        SOURCES["mnist"](dir=str(tmp_path))


@pytest.mark.parametrize("leftover", ["incomplete.ABC_3.0.1", "3.0.1.incompleteABC"])
def test_an_unfinished_preparation_is_no_prepared_set(tmp_path, leftover):
    (tmp_path / "mnist" / leftover).mkdir(parents=True)
    (tmp_path / "mnist" / leftover / "dataset_info.json").write_text("{}")
    assert find_prepared("mnist", tmp_path) is None


# The real thing


@pytest.mark.skipif(not REAL.is_dir(), reason="set OSA_JAX_MNIST to a folder of MNIST's IDX files")
def test_the_real_mnist_is_what_everybody_knows():
    mnist = SOURCES["mnist"](dir=str(REAL))
    assert mnist.train.images.shape == (60000, 28, 28, 1) and mnist.test.images.shape == (10000, 28, 28, 1)
    assert mnist.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert mnist.test.labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert np.bincount(mnist.test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    np.testing.assert_allclose([mnist.mean, mnist.std], [0.1307, 0.3081], atol=5e-5)
    np.testing.assert_allclose(mnist.train.images.min(), mnist.black, rtol=1e-6)
