"""Augmentations against numpy and scipy: every image is a change that the options allow, and all of those occur."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

from osa_jax.data import make_augmentation
from osa_jax.data.augment import random_flip, random_rotation, random_shift

KEY = jax.random.key(0)
IMAGES = np.random.default_rng(0).standard_normal((600, 7, 9, 2)).astype(np.float32)


def shifted(image, down, right, fill):
    """Moves pixel by pixel."""
    result = np.full_like(image, fill)
    for row, column in np.ndindex(image.shape[:2]):
        if 0 <= row - down < image.shape[0] and 0 <= column - right < image.shape[1]:
            result[row, column] = image[row - down, column - right]
    return result


def turned(image, degrees, fill):
    """scipy's affine map about the centre, channel by channel, in float64."""
    angle, centre = np.deg2rad(degrees), (np.array(image.shape[:2]) - 1) / 2
    matrix = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    offset = centre - matrix @ centre
    channels = [
        scipy.ndimage.affine_transform(channel, matrix, offset, order=1, mode="constant", cval=fill)
        for channel in np.moveaxis(image.astype(np.float64), -1, 0)
    ]
    return np.stack(channels, -1)


def test_shift_moves_by_every_offset_alike_and_by_no_other():
    got = np.asarray(random_shift(KEY, IMAGES, pixels=1, fill=-3.0))
    assert got.dtype == np.float32
    counts = np.zeros((3, 3), int)
    for image, moved in zip(IMAGES, got, strict=True):
        matches = [d for d in np.ndindex(3, 3) if np.array_equal(moved, shifted(image, d[0] - 1, d[1] - 1, -3.0))]
        assert len(matches) == 1
        counts[matches[0]] += 1
    assert (np.abs(counts - 600 / 9) < 5 * np.sqrt(600 / 9)).all()


def test_shift_by_more_than_the_image_leaves_only_fill():
    got = np.asarray(random_shift(KEY, IMAGES[:50], pixels=40, fill=0.5))
    blank = (got == 0.5).all(axis=(1, 2, 3))
    assert 30 < blank.sum() <= 50
    assert ((got == 0.5) | np.isin(got, IMAGES[:50])).all()


def test_flip_mirrors_half_of_the_images_left_to_right():
    got = np.asarray(random_flip(KEY, IMAGES))
    kept = (got == IMAGES).all(axis=(1, 2, 3))
    mirrored = (got == np.flip(IMAGES, 2)).all(axis=(1, 2, 3))
    assert (kept ^ mirrored).all() and 240 < mirrored.sum() < 360


def test_rotation_turns_about_the_centre_by_angles_within_the_bound():
    """The first channel is a plane, whose slope at the centre gives the angle away."""
    images = IMAGES[:60].copy()
    images[..., 0] = np.arange(7, dtype=np.float32)[:, None]
    got = np.asarray(random_rotation(KEY, images, degrees=25.0, fill=-3.0))
    assert got.dtype == np.float32
    slope_down, slope_right = got[:, 4, 4, 0] - got[:, 2, 4, 0], got[:, 3, 5, 0] - got[:, 3, 3, 0]
    angles = np.rad2deg(np.arctan2(-slope_right, slope_down))
    assert (np.abs(angles) <= 25.001).all() and angles.min() < -20 and angles.max() > 20
    expected = np.stack([turned(image, angle, -3.0) for image, angle in zip(images, angles, strict=True)])
    # At the border, where scipy fills outside the image and JAX blends with the fill value, they differ.
    inside = np.stack([turned(np.ones((7, 9, 1)), angle, 0.0)[..., 0] for angle in angles]) == 1
    assert inside.mean() > 0.6
    np.testing.assert_allclose(got[inside], expected[inside], atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_composition_is_a_pure_function_of_its_key(dtype):
    augment = make_augmentation(fill=0.0, shift=2, rotation=10.0, flip=True)
    images = jnp.asarray(IMAGES[:5], dtype)
    one = jax.jit(augment)(KEY, images)
    assert one.dtype == dtype and one.shape == images.shape
    np.testing.assert_array_equal(one, jax.jit(augment)(KEY, images))
    tolerance = 20 * float(jnp.finfo(dtype).eps)
    eager = np.asarray(augment(KEY, images), np.float32)
    np.testing.assert_allclose(np.asarray(one, np.float32), eager, atol=tolerance)
    other = np.asarray(jax.jit(augment)(jax.random.key(1), images), np.float32)
    assert (np.abs(other - eager).max(axis=(1, 2, 3)) > 0.1).all()


def test_each_change_has_its_own_randomness_and_order():
    """Flip, then shift, with keys that do not depend on what else is switched on."""
    both = make_augmentation(fill=0.0, shift=1, flip=True)(KEY, IMAGES)
    flips = make_augmentation(fill=0.0, flip=True)(KEY, IMAGES)
    np.testing.assert_array_equal(both, make_augmentation(fill=0.0, shift=1)(KEY, flips))
    assert not np.array_equal(both, flips)


def test_without_changes_it_is_the_identity():
    np.testing.assert_array_equal(make_augmentation(fill=0.0)(KEY, IMAGES), IMAGES)


@pytest.mark.parametrize("change", [{"shift": -1}, {"rotation": -5.0}, {"rotation": float("nan")}])
def test_impossible_changes_are_refused(change):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"{name} must be a finite number that is not negative, got {value}"):
        make_augmentation(fill=0.0, **change)
