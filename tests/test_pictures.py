"""Image files against numpy: scale, standardisation, colour, size, transparency, errors."""

import numpy as np
import pytest
from PIL import Image

from osa_jax.data import Dataset, Split
from osa_jax.training import plot_confusion, plot_predictions, read_picture

GREY = np.array([[0, 51, 255], [255, 102, 0]], np.uint8)


def dataset(*shape):
    split = Split(np.zeros((1, *shape), np.float32), np.zeros(1, np.int32))
    return Dataset(split, split, 10, mean=0.2, std=0.5)


def test_a_grey_picture_of_the_right_size_is_standardised_exactly(tmp_path):
    Image.fromarray(GREY).save(tmp_path / "a.png")
    got = read_picture(tmp_path / "a.png", dataset(2, 3, 1))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got[..., 0], (GREY / 255 - 0.2) / 0.5, rtol=1e-6)
    inverted = read_picture(tmp_path / "a.png", dataset(2, 3, 1), invert=True)
    np.testing.assert_allclose(inverted[..., 0], (1 - GREY / 255 - 0.2) / 0.5, rtol=1e-6)


def test_colours_follow_the_data_set(tmp_path):
    colours = np.stack([GREY, GREY // 2, 255 - GREY], axis=-1)
    Image.fromarray(colours).save(tmp_path / "a.png")
    got = read_picture(tmp_path / "a.png", dataset(2, 3, 3))
    np.testing.assert_allclose(got, (colours / 255 - 0.2) / 0.5, rtol=1e-6)
    luma = colours @ np.array([0.299, 0.587, 0.114])
    grey = read_picture(tmp_path / "a.png", dataset(2, 3, 1))[..., 0] * 0.5 + 0.2
    np.testing.assert_allclose(grey * 255, luma, atol=1)
    with pytest.raises(ValueError, match="1 or 3 channels for pictures, got 2"):
        read_picture(tmp_path / "a.png", dataset(2, 3, 2))


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_any_size_comes_out_as_the_data_sets(suffix, tmp_path):
    halves = np.zeros((90, 200), np.uint8)
    halves[:, 100:] = 255
    Image.fromarray(halves).save(tmp_path / f"a.{suffix}")
    got = read_picture(tmp_path / f"a.{suffix}", dataset(6, 4, 1))[..., 0] * 0.5 + 0.2
    np.testing.assert_allclose(got, np.tile([0, 0, 1, 1], (6, 1)), atol=0.08)


def test_what_is_transparent_is_ground(tmp_path):
    picture = np.zeros((2, 3, 4), np.uint8)
    picture[0, :, 3] = 255
    Image.fromarray(picture).save(tmp_path / "a.png")
    got = read_picture(tmp_path / "a.png", dataset(2, 3, 1), invert=True)[..., 0] * 0.5 + 0.2
    np.testing.assert_allclose(got, [[1, 1, 1], [0, 0, 0]], atol=1e-6)


def test_what_is_no_picture_is_named(tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n")
    for name in ("a.png", "missing.png"):
        with pytest.raises(ValueError, match=f"{name}' cannot be read as an image"):
            read_picture(tmp_path / name, dataset(2, 3, 1))


def test_the_figures_hold_the_numbers(tmp_path, figures):
    plot_confusion(np.array([[3, 0], [1, 2]]), tmp_path / "c.png", title="t")
    texts = {text.get_position(): text.get_text() for text in figures[0].axes[0].texts}
    assert texts == {(0, 0): "3", (0, 1): "1", (1, 1): "2"}
    images = np.random.default_rng(0).normal(size=(5, 2, 3, 1))
    rows = np.array([[0.25, 0.75]] * 4 + [[0.9, 0.1]])
    plot_predictions(images, rows, tmp_path / "p.png", names=list("abcde"))
    assert [axes.get_title() for axes in figures[1].axes[8:10]] == ["e", "0 (90.0 %)"]
    assert [bar.get_width() for bar in figures[1].axes[1].patches] == [0.25, 0.75]
    for name in ("c.png", "p.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
