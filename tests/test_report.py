"""Tables and figures of comparisons: the numbers that they hold."""

import numpy as np
import pytest

from osa_jax.training import plot_curves, plot_values, results_table


def test_results_table_is_mean_and_standard_deviation_of_the_last_rows():
    def rows(accuracy, loss, rate):
        last = {"test_accuracy": accuracy, "test_loss": loss, "train_loss": loss / 2}
        return [last | {"test_accuracy": 0.0, "steps_per_second": 1.0}] + [last | {"steps_per_second": rate}]

    table = results_table({"A": [rows(0.9, 1.0, 10), rows(0.8, 3.0, 30)], "B": [rows(0.5, 2.0, 5)]})
    assert table.splitlines()[2:] == [
        "| A | 85.0 ± 7.1 | 2.000 ± 1.414 | 1.000 ± 0.707 | 20.0 |",
        "| B | 50.0 | 2.000 | 1.000 | 5.0 |",
    ]


def test_results_table_tells_when_a_target_is_reached():
    def rows(*accuracies):
        values = {"test_loss": 1.0, "train_loss": 1.0, "steps_per_second": 1.0}
        return [values | {"step": 10 * i, "test_accuracy": a} for i, a in enumerate(accuracies, 1)]

    runs = {"A": [rows(0.5, 0.9, 0.8), rows(0.9, 0.9, 0.9)], "B": [rows(0.1, 0.2, 0.899)]}
    table = results_table(runs, target=0.9).splitlines()
    assert table[0].endswith("| steps to 90 % |") and table[1].count("---") == table[0].count("|") - 1
    assert table[2].endswith("| 15 |") and "| 85.00 ± 7.07 |" in table[2]
    assert table[3].endswith("| not reached |")
    assert results_table(runs, heading="alpha").startswith("| alpha | test accuracy")


def test_values_are_drawn_with_every_seed_and_their_mean(tmp_path, figures):
    runs = {
        "0.1": [[{"test_accuracy": 0.0}, {"test_accuracy": a}] for a in (0.5, 0.7)],
        "0.2": [[{"test_accuracy": 1}]],
    }
    plot_values(runs, tmp_path / "values.png", title="digits", axis="alpha")
    assert (tmp_path / "values.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    first, second, mean = (line.get_xydata() for line in axes.lines)
    np.testing.assert_allclose(first, [[0, 50], [0, 70]])
    np.testing.assert_allclose(second, [[1, 100]])
    np.testing.assert_allclose(mean, [[0, 60], [1, 100]])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0.1", "0.2"]


@pytest.mark.parametrize("least, scale", [(1.0, "linear"), (1e-3, "log"), (0.0, "linear")])
def test_curves_are_a_picture_of_the_runs(least, scale, tmp_path, figures):
    seeds = [
        [
            {"step": s, "train_loss": least + (3 - s) * k, "test_loss": least + 2.0, "test_accuracy": 0.3 * s}
            for s in (1, 2, 3)
        ]
        for k in (0.5, 1.0)
    ]
    plot_curves({"A": seeds, "B": seeds}, tmp_path / "curves.png", title="digits")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    train, test, error = figures[0].axes
    np.testing.assert_allclose(train.lines[0].get_ydata(), least + np.array([1.5, 0.75, 0]))
    np.testing.assert_allclose(test.lines[1].get_ydata(), [least + 2.0] * 3)
    np.testing.assert_allclose(error.lines[0].get_ydata(), [70, 40, 10])
    assert train.get_yscale() == test.get_yscale() == scale and len(train.collections) == 2
    assert error.get_yscale() == "linear"
    labels = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert labels == ["A", "B"]
