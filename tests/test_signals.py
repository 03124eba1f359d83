"""Table and figures of rank collapse: medians over models and images, and the numbers that are drawn."""

import jax.numpy as jnp
import numpy as np
import pytest

from osa_jax.models.signal import Signal, measure_signal
from osa_jax.training import median_signal, plot_signals, plot_spectra, signal_table


def intermediates(images, factor):
    tokens = images[:, 0] + factor
    return {"tokens": tokens, "block_0/attended": tokens**2, "block_0/output": tokens**3}


def test_the_median_is_over_images_and_models():
    images = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, 4, 2)))

    def model_of(factor):
        def model(images, *, deterministic, return_intermediates):
            assert deterministic and return_intermediates
            return None, intermediates(images, factor)

        return model

    got = median_signal([model_of(factor) for factor in (0.0, 1.0, 3.0)], images)
    each = [measure_signal(intermediates(images[i : i + 1], factor)) for i in range(3) for factor in (0.0, 1.0, 3.0)]
    for name, value in got._asdict().items():
        middle = np.sort([getattr(signal, name)[0] for signal in each], axis=0)[4]
        np.testing.assert_allclose(value, middle, rtol=1e-12)


@pytest.fixture
def signals():
    def signal(rank, kept):
        spectrum = np.array([[0.5, 0.5, 0.0], [0.75, 0.25, 0.0], [1.0, 1e-12, 0.0]])
        return Signal(spectrum, np.array(rank), np.array([0.0, 0.1, 0.25]), np.array([kept]))

    one, two = signal([3.0, 2.0, 1.0], 2 / 3), signal([3.0, 3.0, 1.5], 1.0)
    return {"depth 1": {"ViT": one, "OSA": two}, "depth 1, trained": {"OSA": two}}


def test_the_table_tells_both_ends_and_what_attention_kept(signals):
    assert signal_table(signals).splitlines()[2:] == [
        "| ViT | depth 1 | 3.00 | 1.00 | 66.7 | 0.000 | 0.250 |",
        "| OSA | depth 1 | 3.00 | 1.50 | 100.0 | 0.000 | 0.250 |",
        "| OSA | depth 1, trained | 3.00 | 1.50 | 100.0 | 0.000 | 0.250 |",
    ]


def test_the_figures_hold_the_numbers(signals, tmp_path, figures):
    plot_signals(signals, tmp_path / "a.png", title="digits")
    plot_spectra(signals, tmp_path / "b.png", title="digits")
    for name in ("a.png", "b.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    through, spectra = (np.array(figure.axes).reshape(3, 2) for figure in figures)
    np.testing.assert_allclose(through[0, 0].lines[0].get_xydata(), [[0, 3], [0.5, 2], [1, 1]])
    np.testing.assert_allclose(through[1, 0].lines[0].get_xydata(), [[0, 1], [1, 2 / 3]])
    np.testing.assert_allclose(through[2, 0].lines[1].get_xydata(), [[0, 0], [0.5, 0.1], [1, 0.25]])
    np.testing.assert_allclose(through[0, 1].lines[0].get_ydata(), [3, 3, 1.5])
    for row, last in enumerate(([0.5, 0.5, 1e-8], [0.75, 0.25, 1e-8], [1, 1e-8, 1e-8])):
        np.testing.assert_allclose(spectra[row, 0].lines[0].get_xydata(), np.stack([[1, 2, 3], last], axis=1))
    assert [axes.get_title() for axes in through[0]] == ["depth 1", "depth 1, trained"]
    # A system has the same colour in every column, and stands once in the legend.
    assert through[0, 1].lines[0].get_color() == through[0, 0].lines[1].get_color()
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["ViT", "OSA"]
