"""Data sets and batches. A source is a module with a `load` function, named in `SOURCES`."""

from collections.abc import Callable

from osa_jax.data import digits
from osa_jax.data.batches import Batches, batch_indices, evaluation_batches
from osa_jax.data.dataset import Dataset, Split

SOURCES: dict[str, Callable[..., Dataset]] = {"digits": digits.load}

__all__ = ["SOURCES", "Batches", "Dataset", "Split", "batch_indices", "evaluation_batches"]
