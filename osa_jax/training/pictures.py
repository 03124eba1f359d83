"""Image files as a trained model wants them."""

from pathlib import Path

import numpy as np

from osa_jax.data import Dataset


def read_picture(path: str | Path, dataset: Dataset, *, invert: bool = False) -> np.ndarray:
    """Read an image file and make it like the images of a data set.

    Turned grey where the data set has one channel, coloured where it has three, resized to its
    height and width whatever the shape, and standardised with its mean and standard deviation. What
    is transparent counts as black, or as white with `invert`.

    Args:
      path: a file in any format Pillow reads, such as PNG or JPEG.
      dataset: what the model was trained on.
      invert: whether to exchange dark and light, for dark strokes on a light ground where the data
        set has light on dark.

    Returns:
      The image `[H, W, C]` float32.

    Raises:
      ValueError: if the file cannot be read as an image, or the data set has neither one nor three
        channels.
    """
    from PIL import Image

    height, width, channels = dataset.image_shape
    modes = {1: "L", 3: "RGB"}
    if channels not in modes:
        raise ValueError(f"dataset must have 1 or 3 channels for pictures, got {channels}.")
    try:
        with Image.open(path) as file:
            picture = file.convert("RGBA")
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as an image: {error}") from error
    ground = Image.new("RGBA", picture.size, "white" if invert else "black")
    picture = Image.alpha_composite(ground, picture).convert(modes[channels])
    picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    pixels = np.asarray(picture, np.float64).reshape(height, width, channels) / 255
    if invert:
        pixels = 1 - pixels
    return ((pixels - dataset.mean) / dataset.std).astype(np.float32)
