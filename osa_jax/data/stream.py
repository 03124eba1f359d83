"""Batches of a set that does not fit in memory, read ahead by grain, in the order of `batch_indices`.

Shapes: `N` examples, `B` batch.
"""

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from osa_jax.data.batches import batch_indices
from osa_jax.data.extras import import_extra

Example = Mapping[str, Any]


class RandomAccess(Protocol):
    """Examples by number: `tfds.data_source`, a grain source, or anything with these two methods."""

    def __len__(self) -> int:
        """`N`."""

    def __getitem__(self, index: int) -> Example:
        """Example `index`, read and decoded."""


def stream_batches(
    source: RandomAccess,
    *,
    seed: int,
    batch_size: int,
    first_step: int = 0,
    num_threads: int = 8,
) -> Iterator[dict[str, np.ndarray]]:
    """The batches of steps `first_step, first_step + 1, ...`, without end, read ahead of their use.

    The batch of a step holds the examples `batch_indices(step, seed=seed, ...)`, as in training
    from memory, whatever the step that a resumed run starts from and the number of threads.

    Args:
      source: `N` examples, each a mapping of names to arrays or numbers; several threads read it
        at once.
      seed: a non-negative integer; another seed is another order.
      batch_size: `B`, the number of examples a step takes.
      first_step: the step of the first batch.
      num_threads: threads, each of which reads one batch ahead; with 0 nothing is read ahead.

    Returns:
      An iterator of mappings of the same names to arrays `[B, ...]`.

    Raises:
      ValueError: as `batch_indices`, if `num_threads` is negative, or grain is not installed.

    Example:
      >>> import numpy as np
      >>> source = [{"label": i} for i in range(6)]
      >>> batches = stream_batches(source, seed=0, batch_size=4, first_step=2)
      >>> next(batches)["label"].tolist() == batch_indices(2, seed=0, num_examples=6, batch_size=4).tolist()
      True
    """
    grain = import_extra("grain", extra="tfds")
    indices = functools.partial(batch_indices, seed=seed, num_examples=len(source), batch_size=batch_size)
    indices(first_step)  # refuses what is out of range here, not in a thread
    steps = grain.MapDataset.range(first_step, sys.maxsize).map(lambda step: _stack(source, indices(step)))
    ahead = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=num_threads)
    return iter(steps.to_iter_dataset(ahead))


def _stack(source: RandomAccess, indices: np.ndarray) -> dict[str, np.ndarray]:
    examples = [source[int(index)] for index in indices]
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}
