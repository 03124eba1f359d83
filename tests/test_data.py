"""The digits themselves, the order of the batches, and evaluation batches that cover a split."""

import collections

import numpy as np
import pytest
from sklearn.datasets import load_digits

from osa_jax.data import SOURCES, Split, batch_indices, evaluation_batches


@pytest.fixture(scope="module")
def digits():
    return SOURCES["digits"]()


def test_digits_are_all_of_scikit_learns_images_split_once(digits):
    source = load_digits()
    both = np.concatenate([digits.train.images, digits.test.images])[..., 0]
    labels = np.concatenate([digits.train.labels, digits.test.labels])
    mean, std = digits.train.images.mean(dtype=np.float64), digits.train.images.std()
    assert abs(mean) < 1e-6 and abs(std - 1) < 1e-5
    # A pixel is an integer from 0 to 16 up to one affine map, which the two extremes determine.
    pixels = 16 * (both - both.min()) / (both.max() - both.min())
    np.testing.assert_allclose(pixels, np.rint(pixels), atol=1e-4)

    def multiset(images, targets):
        rows = zip(images.astype(int).reshape(len(images), -1), targets, strict=True)
        return collections.Counter((tuple(image), int(target)) for image, target in rows)

    assert multiset(np.rint(pixels), labels) == multiset(source.images, source.target)


def test_digits_have_the_documented_form_and_class_balance(digits):
    assert digits.image_shape == (8, 8, 1) and digits.num_classes == 10
    assert digits.train.images.shape == (1437, 8, 8, 1) and len(digits.test.labels) == 360
    assert digits.train.images.dtype == np.float32 and digits.train.labels.dtype == np.int32
    share = np.bincount(digits.train.labels) / 1437
    np.testing.assert_allclose(np.bincount(digits.test.labels) / 360, share, atol=2 / 360)


def test_digits_split_never_changes(digits):
    again = SOURCES["digits"]()
    np.testing.assert_array_equal(digits.test.images, again.test.images)
    assert digits.test.labels[:12].tolist() == EXPECTED_TEST_LABELS


EXPECTED_TEST_LABELS = [7, 6, 3, 7, 7, 3, 2, 8, 9, 3, 2, 6]


@pytest.mark.parametrize("num_examples, batch_size", [(10, 3), (10, 10), (7, 20), (1, 1)])
def test_every_epoch_of_the_stream_is_a_permutation(num_examples, batch_size):
    epochs = 6
    steps = -(-epochs * num_examples // batch_size)
    stream = np.concatenate(
        [batch_indices(step, seed=3, num_examples=num_examples, batch_size=batch_size) for step in range(steps)]
    )[: epochs * num_examples].reshape(epochs, num_examples)
    np.testing.assert_array_equal(np.sort(stream), np.tile(np.arange(num_examples), (epochs, 1)))
    if num_examples > 6:
        assert len({tuple(epoch) for epoch in stream}) == epochs


def test_the_order_is_a_function_of_seed_and_step_alone():
    def indices(step, seed):
        return batch_indices(step, seed=seed, num_examples=50, batch_size=8).tolist()

    forwards = [indices(step, 0) for step in range(20)]
    assert [indices(step, 0) for step in reversed(range(20))] == forwards[::-1]
    assert indices(0, 0) != indices(0, 1) and indices(0, 0) != indices(1, 0)


@pytest.mark.parametrize("change", [{"step": -1}, {"seed": -1}, {"num_examples": 0}, {"batch_size": 0}])
def test_batch_indices_refuse_what_has_no_order(change):
    arguments = {"step": 0, "seed": 0, "num_examples": 5, "batch_size": 2} | change
    (name,) = change
    with pytest.raises(ValueError, match=f"{name} must be at least .* got {change[name]}"):
        batch_indices(arguments.pop("step"), **arguments)


@pytest.mark.parametrize("batch_size", [1, 3, 11, 12, 500])
def test_evaluation_batches_hold_every_example_exactly_once(batch_size):
    rng = np.random.default_rng(0)
    split = Split(rng.normal(size=(11, 2, 2, 1)).astype(np.float32), np.arange(11, dtype=np.int32))
    batches = evaluation_batches(split, batch_size=batch_size)
    real = batches.weights.ravel() == 1
    assert real.sum() == batches.weights.sum() == 11
    np.testing.assert_array_equal(batches.labels.ravel()[real], split.labels)
    np.testing.assert_array_equal(batches.images.reshape(-1, 2, 2, 1)[real], split.images)
    assert batches.images.shape[:2] == batches.labels.shape == (-(-11 // min(batch_size, 11)),) + (min(batch_size, 11),)


def test_evaluation_batches_refuse_bad_input():
    images, labels = np.ones((2, 2, 2, 1), np.float32), np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        evaluation_batches(Split(images, labels), batch_size=0)
    with pytest.raises(ValueError, match="no examples"):
        evaluation_batches(Split(images[:0], labels[:0]), batch_size=1)
