"""IDX files, the format in which MNIST and its relatives are published, plain or compressed with gzip.

Shapes: `N` examples, `[H, W]` one image.
"""

import gzip
import os
import zlib
from pathlib import Path

import numpy as np

from osa_jax.data.dataset import Split

SPLIT_PREFIXES = ("train", "t10k")
IMAGES_FILE = "{}-images-idx3-ubyte"
LABELS_FILE = "{}-labels-idx1-ubyte"

_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08


def read_idx(path: str | Path, *, ndim: int) -> np.ndarray:
    """Read one array of unsigned bytes.

    The file is `00 00 08 ndim`, then `ndim` sizes as big-endian 32-bit integers, then the bytes.

    Args:
      path: the file, plain or gzip (its content decides, not its name).
      ndim: the number of axes that it must have: 3 for images, 1 for labels.

    Returns:
      An array of `ndim` axes, uint8.

    Raises:
      ValueError: naming the file, if it cannot be read, is damaged, is no IDX file of that many
        axes, or holds fewer or more bytes than its header announces.

    Example:
      >>> import tempfile
      >>> with tempfile.NamedTemporaryFile() as file:
      ...     _ = file.write(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
      ...     file.flush()
      ...     read_idx(file.name, ndim=1)
      array([7, 2, 1], dtype=uint8)
    """
    content = _content(Path(path))
    header_size = 4 + 4 * ndim
    magic = bytes([0, 0, _UNSIGNED_BYTE, ndim])
    if not content.startswith(magic[: len(content)]):
        raise ValueError(
            f"{path} is not an IDX file of unsigned bytes with {ndim} axes: "
            f"it begins with 0x{content[:4].hex()}, not 0x{magic.hex()}."
        )
    if len(content) < header_size:
        raise ValueError(f"{path} is truncated: it holds {len(content)} of the {header_size} bytes of its header.")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", ndim, offset=4))
    expected, found = np.prod(shape, dtype=object), len(content) - header_size
    if found != expected:
        kind = "is truncated" if found < expected else "is damaged"
        raise ValueError(f"{path} {kind}: it holds {found} bytes after its header, which announces {expected}.")
    return np.frombuffer(content, np.uint8, offset=header_size).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(_GZIP_MAGIC) else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is truncated or damaged: {str(error).rstrip('.')}.") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error


def read_split(
    images_path: str | Path, labels_path: str | Path, *, image_size: tuple[int, int], num_classes: int
) -> Split:
    """Read the images and the labels of one split and check that they belong together.

    Args:
      images_path: an IDX file of three axes, `[N, H, W]`.
      labels_path: an IDX file of one axis, `[N]`.
      image_size: `(H, W)`, the size that the images must have.
      num_classes: labels must lie in `[0, num_classes)`.

    Returns:
      A `Split` of the pixels as they are stored: images `[N, H, W, 1]` uint8, labels `[N]` int32.

    Raises:
      ValueError: naming the file, as `read_idx`, or if the images have another size or there are
        none, the counts differ, or a label is out of range.
    """
    images, labels = read_idx(images_path, ndim=3), read_idx(labels_path, ndim=1)
    if images.shape[1:] != image_size:
        size, wanted = ("x".join(map(str, shape)) for shape in (images.shape[1:], image_size))
        raise ValueError(f"{images_path} holds images of {size} pixels, expected {wanted}.")
    if len(images) != len(labels):
        raise ValueError(f"{images_path} holds {len(images)} images, but {labels_path} holds {len(labels)} labels.")
    if len(images) == 0:
        raise ValueError(f"{images_path} holds no images.")
    if labels.max() >= num_classes:
        at = int(np.argmax(labels >= num_classes))
        raise ValueError(f"{labels_path}: label {labels[at]} at position {at} is out of range [0, {num_classes}).")
    return Split(images[..., np.newaxis], labels.astype(np.int32))


def idx_files(folder: str | Path) -> list[tuple[Path, Path]]:
    """The images' and labels' files of the training and the test split, as a folder should hold them.

    Args:
      folder: a folder; of a file and its `.gz` the plain one is taken.

    Returns:
      `[(train images, train labels), (test images, test labels)]`; a file that is not there keeps
      its plain name, so that reading it says what is missing.

    Example:
      >>> [images.name for images, _ in idx_files("data/mnist")]
      ['train-images-idx3-ubyte', 't10k-images-idx3-ubyte']
    """

    def find(pattern: str, prefix: str) -> Path:
        plain = Path(folder) / pattern.format(prefix)
        compressed = plain.with_name(plain.name + ".gz")
        return compressed if os.path.exists(compressed) and not os.path.exists(plain) else plain

    return [(find(IMAGES_FILE, prefix), find(LABELS_FILE, prefix)) for prefix in SPLIT_PREFIXES]
