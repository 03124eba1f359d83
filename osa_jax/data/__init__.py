"""Data sets and batches. A source is a function that returns a `Dataset`, named in `SOURCES`."""

from collections.abc import Callable

from osa_jax.data import digits, mnist
from osa_jax.data.augment import make_augmentation
from osa_jax.data.batches import Batches, batch_indices, evaluation_batches
from osa_jax.data.dataset import Dataset, Split
from osa_jax.data.stream import stream_batches

SOURCES: dict[str, Callable[..., Dataset]] = {
    "digits": digits.load,
    "mnist": mnist.load,
    "fashion_mnist": mnist.load_fashion,
}

__all__ = [
    "SOURCES",
    "Batches",
    "Dataset",
    "Split",
    "batch_indices",
    "evaluation_batches",
    "make_augmentation",
    "stream_batches",
]
