"""Batches read ahead by grain: the order of training from memory, from any step on."""

import itertools
import sys
import threading

import numpy as np
import pytest

from osa_jax.data import batch_indices, stream_batches

pytest.importorskip("grain")

ORDER = {"seed": 3, "batch_size": 4}


class Source:
    """Ten examples that say their number; `threads` are those that read them."""

    def __init__(self):
        self.threads = set()

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.threads.add(threading.get_ident())
        if not 0 <= index < 10:
            raise IndexError(index)
        return {"image": np.full((2, 3), index, np.uint8), "label": index}


def first(count, **options):
    return list(itertools.islice(stream_batches(Source(), **ORDER, **options), count))


@pytest.mark.parametrize("num_threads", [0, 1, 5])
def test_the_order_is_that_of_training_from_memory(num_threads):
    for step, batch in enumerate(first(12, num_threads=num_threads)):
        indices = batch_indices(step, num_examples=10, **ORDER)
        np.testing.assert_array_equal(batch["label"], indices)
        assert batch["image"].shape == (4, 2, 3) and batch["image"].dtype == np.uint8
        np.testing.assert_array_equal(batch["image"], np.broadcast_to(indices[:, None, None], (4, 2, 3)))


@pytest.mark.parametrize("first_step", [1, 7, 1_000_003])
def test_a_resumed_stream_goes_on_where_it_stopped(first_step):
    whole = [batch_indices(step, num_examples=10, **ORDER).tolist() for step in range(first_step, first_step + 3)]
    assert [batch["label"].tolist() for batch in first(3, first_step=first_step)] == whole


def test_other_threads_read_ahead():
    source = Source()
    next(stream_batches(source, **ORDER))
    assert source.threads and threading.get_ident() not in source.threads


def test_an_error_of_the_source_arrives():
    class Broken(Source):
        def __getitem__(self, index):
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        next(stream_batches(Broken(), **ORDER))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"first_step": -2}, "step must be at least 0, got -2"),
        ({"num_threads": -1}, "num_threads must be non-negative, got -1"),
    ],
)
def test_bad_arguments_are_refused_at_once(change, message):
    with pytest.raises(ValueError, match=message):
        stream_batches(Source(), **ORDER | change)


def test_without_grain_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ValueError, match=r"grain cannot be imported .*'osa_jax\[tfds\]'"):
        stream_batches(Source(), **ORDER)
