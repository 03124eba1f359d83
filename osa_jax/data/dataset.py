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
    """A classification data set: the two splits and the number of classes."""

    train: Split
    test: Split
    num_classes: int

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape `(H, W, C)` of one image."""
        height, width, channels = self.train.images.shape[1:]
        return height, width, channels
