"""What every source of data returns: arrays in memory, in two splits.

Shapes: `N` examples of one split, `[H, W, C]` one image.
"""

from typing import NamedTuple

import numpy as np


class Split(NamedTuple):
    """The examples of one split: images `[N, H, W, C]` float32 and labels `[N]` int32."""

    images: np.ndarray
    labels: np.ndarray


class Dataset(NamedTuple):
    """A classification data set: the two splits and the number of classes.

    Pixels are `(x - mean) / std`, with `x` from 0 (black) to 1 (white).
    """

    train: Split
    test: Split
    num_classes: int
    mean: float = 0.0
    std: float = 1.0

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape `(H, W, C)` of one image."""
        height, width, channels = self.train.images.shape[1:]
        return height, width, channels

    @property
    def black(self) -> float:
        """The value in the images of a black pixel."""
        return -self.mean / self.std


def standardise(train: Split, test: Split, *, num_classes: int, white: int = 255) -> Dataset:
    """Make pixels of mean 0 and standard deviation 1 over the training images: `(x - mean) / std`.

    Args:
      train: images `[N, H, W, C]` uint8, of which mean and standard deviation are taken.
      test: images uint8, which are transformed with the same two numbers.
      num_classes: the number of classes.
      white: the value of a white pixel in the source; a black one is 0.

    Returns:
      A `Dataset` with images in float32.

    Raises:
      ValueError: if all training pixels are the same.

    Example:
      >>> import numpy as np
      >>> split = Split(np.array([0, 2], np.uint8).reshape(2, 1, 1, 1), np.zeros(2, np.int32))
      >>> standardise(split, split, num_classes=1).train.images.ravel()
      array([-1.,  1.], dtype=float32)
    """
    mean, std = float(train.images.mean()), float(train.images.std())
    if std == 0:
        raise ValueError(f"every pixel of the training images is {mean:g}: they cannot be standardised.")
    # One float for each of the 256 values that a pixel can have.
    table = ((np.arange(256) - mean) / std).astype(np.float32)
    train, test = (split._replace(images=table[split.images]) for split in (train, test))
    return Dataset(train, test, num_classes, mean / white, std / white)
