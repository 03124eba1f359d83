"""Batches: a training order that only the seed and the step decide, and whole-set evaluation.

Shapes: `N` examples, `B` batch, `K` batches.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from osa_jax.data.dataset import Split


class Batches(NamedTuple):
    """Images `[K, B, H, W, C]`, labels `[K, B]` and weights `[K, B]`, which are 0 on padding."""

    images: np.ndarray
    labels: np.ndarray
    weights: np.ndarray


def batch_indices(step: int, *, seed: int, num_examples: int, batch_size: int) -> np.ndarray:
    """The examples of training step `step`, by `(seed, step)` alone.

    The steps read one endless stream, in which every epoch is a new permutation of the examples:
    position `p = step * batch_size + i` is entry `p mod N` of permutation `p // N`. A batch may
    end one epoch and begin the next, so no example is ever left out.

    Args:
      step: the step's number, from 0.
      seed: a non-negative integer; another seed is another order.
      num_examples: `N`, the number of examples to draw from.
      batch_size: `B`, the number of examples a step takes.

    Returns:
      Indices `[B]` int32.

    Raises:
      ValueError: if `step` or `seed` is negative, or `num_examples` or `batch_size` is below 1.

    Example:
      >>> import numpy as np
      >>> steps = [batch_indices(s, seed=0, num_examples=6, batch_size=4) for s in range(3)]
      >>> np.sort(np.concatenate(steps)).tolist()
      [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    """
    for name, value, least in (
        ("step", step, 0),
        ("seed", seed, 0),
        ("num_examples", num_examples, 1),
        ("batch_size", batch_size, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}.")
    positions = step * batch_size + np.arange(batch_size)
    epochs, entries = np.divmod(positions, num_examples)
    indices = np.empty(batch_size, np.int32)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = _permutation(seed, int(epoch), num_examples)[entries[here]]
    return indices


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_examples: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_examples).astype(np.int32)


def evaluation_batches(split: Split, *, batch_size: int) -> Batches:
    """Cut a split into equal batches that hold every example exactly once.

    The last batch is filled up with examples of weight 0, so that a weighted mean over the
    batches is the plain mean over the split, whatever the batch size.

    Args:
      split: images `[N, H, W, C]` and labels `[N]`.
      batch_size: `B`; more than `N` counts as `N`.

    Returns:
      `Batches` with `K = ceil(N / B)` batches; weights are float32.

    Raises:
      ValueError: if `batch_size` is below 1 or the split is empty.

    Example:
      >>> import numpy as np
      >>> split = Split(np.ones((5, 8, 8, 1), np.float32), np.arange(5, dtype=np.int32))
      >>> evaluation_batches(split, batch_size=3).weights
      array([[1., 1., 1.],
             [1., 1., 0.]], dtype=float32)
    """
    num_examples = len(split.labels)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    if num_examples == 0:
        raise ValueError("split holds no examples: there is nothing to evaluate.")
    batch_size = min(batch_size, num_examples)
    num_batches = -(-num_examples // batch_size)
    padding = num_batches * batch_size - num_examples

    def stack(array: np.ndarray) -> np.ndarray:
        padded = np.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1))
        return padded.reshape(num_batches, batch_size, *array.shape[1:])

    weights = np.ones(num_examples, np.float32)
    return Batches(stack(split.images), stack(split.labels), stack(weights))
