"""MNIST and Fashion-MNIST: 60,000 training and 10,000 test images of 28x28 pixels, ten classes."""

from pathlib import Path

from osa_jax.data.dataset import Dataset, Split, standardise
from osa_jax.data.idx import idx_files, read_split
from osa_jax.data.prepared import default_folder, find_prepared, read_prepared

IMAGE_SIZE = (28, 28)
NUM_CLASSES = 10


def load(*, dir: str | None = None) -> Dataset:
    """Load MNIST, standardised, from files on this machine.

    `dir` is either a folder of the four IDX files, plain or `.gz`, or a TFDS data folder in which
    `mnist` is prepared as array_record; nothing is ever downloaded. Pixels are `(x - mean) / std`
    with the two numbers of the training images.

    Args:
      dir: the folder; by default TFDS's, `$TFDS_DATA_DIR` or `~/tensorflow_datasets`.

    Returns:
      A `Dataset` of ten classes with images `[N, 28, 28, 1]` float32 and labels `[N]` int32, in
      the order in which they are stored.

    Raises:
      ValueError: naming the folder or file, if there is no such set (with the command that
        prepares it), or its files are unreadable, truncated or not what they should be.

    Example:
      >>> load(dir="no/such/folder")
      Traceback (most recent call last):
      ValueError: mnist is not in 'no/such/folder', neither as IDX files nor prepared: run python
          experiments/prepare_data.py --name=mnist --data_dir=no/such/folder, with --idx_dir=FOLDER
          to take it from IDX files instead of a download.
    """
    return _load("mnist", dir)


def load_fashion(*, dir: str | None = None) -> Dataset:
    """Load Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017), as `load` does MNIST.

    Args:
      dir: a folder of IDX files, or a TFDS data folder with `fashion_mnist`; by default TFDS's.

    Returns:
      A `Dataset`, as `load`.

    Raises:
      ValueError: as `load`.

    Example:
      >>> load_fashion(dir="no/such/folder")
      Traceback (most recent call last):
      ValueError: fashion_mnist is not in 'no/such/folder', ...
    """
    return _load("fashion_mnist", dir)


def read_files(folder: str | Path) -> tuple[Split, Split]:
    """Read a folder of four IDX files of this size and number of classes.

    Args:
      folder: the folder.

    Returns:
      The training and the test split of the pixels as they are stored, see `read_split`.

    Raises:
      ValueError: as `read_split`.
    """
    train, test = (read_split(*pair, image_size=IMAGE_SIZE, num_classes=NUM_CLASSES) for pair in idx_files(folder))
    return train, test


def _load(name: str, dir: str | None) -> Dataset:
    folder = Path(dir or default_folder()).expanduser()
    if any(path.is_file() for pair in idx_files(folder) for path in pair):
        train, test = read_files(folder)
    elif version := find_prepared(name, folder):
        train, test = read_prepared(version, image_size=IMAGE_SIZE)
    else:
        raise ValueError(
            f"{name} is not in {str(folder)!r}, neither as IDX files nor prepared: run "
            f"python experiments/prepare_data.py --name={name} --data_dir={folder}, "
            "with --idx_dir=FOLDER to take it from IDX files instead of a download."
        )
    return standardise(train, test, num_classes=NUM_CLASSES)
