"""Random changes of training images, as pure functions of a key that can be jitted.

Shapes: `B` images of one batch, `[H, W, C]` one image.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.scipy.ndimage import map_coordinates

Augmentation = Callable[[jax.Array, jax.Array], jax.Array]


def random_shift(key: jax.Array, images: jax.Array, *, pixels: int, fill: float) -> jax.Array:
    """Move every image by whole pixels, uniform in `[-pixels, pixels]` along each axis.

    Args:
      key: a random key.
      images: `[B, H, W, C]`.
      pixels: the largest shift.
      fill: the value of what comes in from outside.

    Returns:
      Images `[B, H, W, C]` of the same dtype.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> image = jnp.zeros((1, 5, 5, 1), jnp.float32).at[:, 2, 2].set(1.0)
      >>> float(random_shift(jax.random.key(0), image, pixels=2, fill=0.0).sum())
      1.0
    """
    offsets = jax.random.randint(key, (len(images), 2), 0, 2 * pixels + 1)
    margin = ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0))
    padded = jnp.pad(images, margin, constant_values=fill)

    def crop(image: jax.Array, offset: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(image, (offset[0], offset[1], 0), images.shape[1:])

    return jax.vmap(crop)(padded, offsets)


def random_rotation(key: jax.Array, images: jax.Array, *, degrees: float, fill: float) -> jax.Array:
    """Turn every image about its centre, by an angle uniform in `[-degrees, degrees]`, bilinearly.

    Args:
      key: a random key.
      images: `[B, H, W, C]`.
      degrees: the largest angle.
      fill: the value of what comes in from outside.

    Returns:
      Images `[B, H, W, C]` of the same dtype.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> image = jnp.zeros((1, 5, 5, 1), jnp.float32).at[:, 2, 2].set(1.0)
      >>> turned = random_rotation(jax.random.key(0), image, degrees=15.0, fill=0.0)
      >>> float(turned[0, 2, 2, 0])
      1.0
    """
    height, width = images.shape[1:3]
    rows = jnp.arange(height, dtype=jnp.float32)[:, None] - (height - 1) / 2
    columns = jnp.arange(width, dtype=jnp.float32)[None, :] - (width - 1) / 2

    def turn(image: jax.Array, angle: jax.Array) -> jax.Array:
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        places = [cos * rows - sin * columns + (height - 1) / 2, sin * rows + cos * columns + (width - 1) / 2]
        sample = functools.partial(map_coordinates, coordinates=places, order=1, mode="constant", cval=fill)
        return jax.vmap(sample, in_axes=-1, out_axes=-1)(image)

    angles = jax.random.uniform(key, (len(images),), jnp.float32, -degrees, degrees)
    return jax.vmap(turn)(images, jnp.deg2rad(angles)).astype(images.dtype)


def random_flip(key: jax.Array, images: jax.Array) -> jax.Array:
    """Mirror every image left to right, with probability one half.

    Args:
      key: a random key.
      images: `[B, H, W, C]`.

    Returns:
      Images `[B, H, W, C]` of the same dtype.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> images = jnp.broadcast_to(jnp.arange(2, dtype=jnp.float32), (100, 1, 2))[..., None]
      >>> flipped = random_flip(jax.random.key(0), images)[:, 0, 0, 0]
      >>> 30 < int(flipped.sum()) < 70
      True
    """
    mirrored = jax.random.bernoulli(key, 0.5, (len(images), 1, 1, 1))
    return jnp.where(mirrored, images[:, :, ::-1], images)


def make_augmentation(*, fill: float, shift: int = 0, rotation: float = 0.0, flip: bool = False) -> Augmentation:
    """Compose the random changes of a config: first the flip, then the rotation, then the shift.

    Args:
      fill: the value of what comes in from outside: `Dataset.black`.
      shift: the largest shift along each axis, in pixels.
      rotation: the largest angle, in degrees.
      flip: whether to mirror half of the images left to right.

    Returns:
      A pure function `(key, images [B, H, W, C]) -> images`; without changes, the identity.

    Raises:
      ValueError: if `shift` or `rotation` is negative.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> augment = make_augmentation(fill=0.0, shift=2, rotation=10.0)
      >>> jax.jit(augment)(jax.random.key(0), jnp.ones((3, 8, 8, 1), jnp.float32)).shape
      (3, 8, 8, 1)
    """
    for name, value in (("shift", shift), ("rotation", rotation)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be a finite number that is not negative, got {value}.")

    def augment(key: jax.Array, images: jax.Array) -> jax.Array:
        flip_key, rotation_key, shift_key = jax.random.split(key, 3)
        if flip:
            images = random_flip(flip_key, images)
        if rotation:
            images = random_rotation(rotation_key, images, degrees=rotation, fill=fill)
        if shift:
            images = random_shift(shift_key, images, pixels=shift, fill=fill)
        return images

    return augment
