"""Handwritten digits from scikit-learn: 1,797 real 8x8 images that come with its wheel."""

import numpy as np

from osa_jax.data.dataset import Dataset, Split, standardise

NUM_TEST = 360
SPLIT_SEED = 0


def load() -> Dataset:
    """Load scikit-learn's digits, standardised, in a fixed stratified split.

    1,437 images train and 360 test, each class in proportion; the split never changes (it has its
    own fixed seed). Pixels are `(x - mean) / std` with the two numbers of the training images.

    Returns:
      A `Dataset` of ten classes with images `[N, 8, 8, 1]` float32 and labels `[N]` int32.

    Example:
      >>> digits = load()
      >>> digits.train.images.shape, digits.test.images.shape, digits.num_classes
      ((1437, 8, 8, 1), (360, 8, 8, 1), 10)
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    source = load_digits()
    train_images, test_images, train_labels, test_labels = train_test_split(
        source.images,
        source.target,
        test_size=NUM_TEST,
        stratify=source.target,
        random_state=SPLIT_SEED,
    )

    def split(images: np.ndarray, labels: np.ndarray) -> Split:
        return Split(images[..., np.newaxis].astype(np.uint8), labels.astype(np.int32))

    return standardise(split(train_images, train_labels), split(test_images, test_labels), num_classes=10, white=16)
