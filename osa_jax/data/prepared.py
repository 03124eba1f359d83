"""Data sets that TensorFlow Datasets has prepared on disk, read without TensorFlow and without a network.

Shapes: `N` examples, `[H, W]` one image.
"""

import io
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from osa_jax.data.dataset import Split
from osa_jax.data.extras import import_extra

SPLIT_NAMES = ("train", "test")


def default_folder() -> str:
    """TFDS's own default: `$TFDS_DATA_DIR`, or `~/tensorflow_datasets`."""
    return os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")


def find_prepared(name: str, folder: str | Path) -> Path | None:
    """Where the newest prepared version of a data set lies, `folder/name/1.2.3`, or None.

    Args:
      name: TFDS's name of the data set.
      folder: a TFDS data folder.

    Returns:
      The folder of that version, or None where there is none.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     for version in ("1.9.0", "1.10.0", "incomplete.2.0.0"):
      ...         (Path(folder) / "mnist" / version).mkdir(parents=True)
      ...         _ = (Path(folder) / "mnist" / version / "dataset_info.json").write_text("{}")
      ...     find_prepared("mnist", folder).name
      '1.10.0'
    """
    versions = (info.parent for info in Path(folder).glob(f"{name}/*/dataset_info.json"))
    prepared = [version for version in versions if re.fullmatch(r"\d+\.\d+\.\d+", version.name)]
    return max(prepared, key=lambda version: tuple(map(int, version.name.split("."))), default=None)


def read_prepared(folder: str | Path, *, image_size: tuple[int, int]) -> tuple[Split, Split]:
    """Read the training and the test split of a prepared version into memory.

    Args:
      folder: what `find_prepared` returned; its files must be array_record.
      image_size: `(H, W)`, the size that the images must have.

    Returns:
      Two `Split`s of the pixels as they are stored, in the stored order: images `[N, H, W, 1]`
      uint8, labels `[N]` int32.

    Raises:
      ValueError: naming the folder, if tensorflow-datasets is not installed, a file is missing,
        damaged or in another format, or the images have another size.
    """
    tfds = import_extra("tensorflow_datasets", extra="tfds")
    try:
        builder = tfds.builder_from_directory(folder)
        # TFDS's own decoder takes twice the time.
        decoders = {"image": tfds.decode.SkipDecoding()}
        train, test = (_read_split(builder.as_data_source(name, decoders=decoders)) for name in SPLIT_NAMES)
    except NotImplementedError as error:
        raise ValueError(
            f"{folder} is not prepared as array_record, which alone can be read without TensorFlow: "
            "prepare the set in another folder with experiments/prepare_data.py."
        ) from error
    except Exception as error:  # TFDS, protobuf, array_record and Pillow have no common kind of error.
        reason = str(error).split("\n")[0]
        raise ValueError(f"{folder} cannot be read ({reason}): remove it and prepare the set again.") from error
    for split in (train, test):
        if split.images.shape[1:] != (*image_size, 1):
            raise ValueError(f"{folder} holds images of shape {split.images.shape[1:]}, expected {(*image_size, 1)}.")
    return train, test


def _read_split(source: Any) -> Split:
    """All examples of a TFDS data source with encoded images."""
    from PIL import Image

    examples = source.__getitems__(range(len(source)))
    images = np.stack([np.asarray(Image.open(io.BytesIO(example["image"]))) for example in examples])
    labels = np.array([example["label"] for example in examples], np.int32)
    return Split(images[..., np.newaxis], labels)
