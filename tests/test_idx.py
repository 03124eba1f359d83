"""IDX files: what is read back, and one line for everything that can be wrong with them."""

import gzip
import struct

import numpy as np
import pytest

from osa_jax.data.idx import idx_files, read_idx, read_split
from tests.idx_writer import NAMES, idx_bytes, random_split, write_folder, write_idx


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("shape", [(5,), (4, 3, 2), (0,), (2, 0, 7)])
def test_arrays_are_read_back(tmp_path, shape, suffix):
    array = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    got = read_idx(write_idx(tmp_path / f"file{suffix}", array), ndim=len(shape))
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, array)


def test_the_content_decides_what_is_compressed(tmp_path):
    (tmp_path / "plain.gz").write_bytes(idx_bytes([1, 2]))
    (tmp_path / "compressed").write_bytes(gzip.compress(idx_bytes([1, 2])))
    for name in ("plain.gz", "compressed"):
        assert read_idx(tmp_path / name, ndim=1).tolist() == [1, 2]


IMAGES = idx_bytes(random_split(6, seed=0)[0])
COMPRESSED = gzip.compress(IMAGES)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is truncated: it holds 0 of the 16 bytes of its header"),
        (IMAGES[:3], "is truncated: it holds 3 of the 16 bytes"),
        (IMAGES[:15], "is truncated: it holds 15 of the 16 bytes"),
        (IMAGES[:-1], "is truncated: it holds 4703 bytes after its header, which announces 4704"),
        (IMAGES + b"\0", "is damaged: it holds 4705 bytes after its header, which announces 4704"),
        (idx_bytes([1, 2, 3]), "with 3 axes: it begins with 0x00000801, not 0x00000803"),
        (b"\0\0\x0d\x03" + IMAGES[4:], "it begins with 0x00000d03, not 0x00000803"),
        (b"<html>no such page</html>", "is not an IDX file of unsigned bytes .* begins with 0x3c68746d"),
        (struct.pack(">4I", 0x803, *[2**32 - 1] * 3), "holds 0 bytes after its header, which announces 792281"),
        (COMPRESSED[:-9], "is truncated or damaged: Compressed file ended before"),
        (COMPRESSED[:500] + b"\0\1\2\3" + COMPRESSED[504:], "is truncated or damaged"),
        (COMPRESSED[:-6] + b"\0\1" + COMPRESSED[-4:], "is truncated or damaged: CRC check failed"),
    ],
)
def test_a_wrong_file_is_named_in_one_line(tmp_path, content, message):
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path} .*{message}") as error:
        read_idx(path, ndim=3)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"^{tmp_path}/none cannot be read: No such file or directory.$"):
        read_idx(tmp_path / "none", ndim=1)
    with pytest.raises(ValueError, match=f"^{tmp_path} cannot be read: Is a directory.$"):
        read_idx(tmp_path, ndim=1)


def read(folder, images, labels):
    paths = write_idx(folder / "images", images), write_idx(folder / "labels", labels)
    return read_split(*paths, image_size=(28, 28), num_classes=10)


def test_a_split_has_a_channel_axis_and_int32_labels(tmp_path):
    images, labels = random_split(7, seed=3)
    split = read(tmp_path, images, labels)
    assert split.images.dtype == np.uint8 and split.labels.dtype == np.int32
    np.testing.assert_array_equal(split.images, images[..., None])
    np.testing.assert_array_equal(split.labels, labels)


@pytest.mark.parametrize(
    "images, labels, message",
    [
        (np.zeros((2, 28, 27)), [0, 1], "images holds images of 28x27 pixels, expected 28x28"),
        (np.zeros((2, 28, 28)), [0, 1, 2], "images holds 2 images, but .*labels holds 3 labels"),
        (np.zeros((0, 28, 28)), [], "images holds no images"),
        (np.zeros((3, 28, 28)), [9, 10, 77], r"labels: label 10 at position 1 is out of range \[0, 10\)"),
    ],
)
def test_images_and_labels_that_do_not_fit_are_refused(tmp_path, images, labels, message):
    with pytest.raises(ValueError, match=f"^{tmp_path}/{message}"):
        read(tmp_path, images, labels)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_folder_names_its_files(tmp_path, suffix):
    write_folder(tmp_path, suffix=suffix)
    assert idx_files(tmp_path) == [tuple(tmp_path / (name + suffix) for name in names) for names in NAMES.values()]


def test_of_two_files_the_plain_one_is_taken(tmp_path):
    write_folder(tmp_path)
    write_folder(tmp_path, suffix=".gz")
    assert all(path.suffix == "" for pair in idx_files(tmp_path) for path in pair)
