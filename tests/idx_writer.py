"""Writes IDX files byte by byte."""

import gzip
import struct

import numpy as np

NAMES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def idx_bytes(array):
    array = np.asarray(array, np.uint8)
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(path, array):
    content = idx_bytes(array)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def random_split(count, *, seed, size=(28, 28)):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, *size)), rng.integers(0, 10, count)


def write_folder(folder, *, train=23, test=11, suffix=""):
    """Four files of random images and labels; returns the arrays `{split: (images, labels)}`."""
    folder.mkdir(exist_ok=True)
    splits = {"train": random_split(train, seed=1), "test": random_split(test, seed=2)}
    for split, arrays in splits.items():
        for name, array in zip(NAMES[split], arrays, strict=True):
            write_idx(folder / (name + suffix), array)
    return splits
