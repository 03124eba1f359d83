"""Hessians of the operator, in every composition of the two modes, on regular and singular inputs."""

import functools

import jax
import pytest
from jax.test_util import check_grads

from tests import reference
from tests.reference import TOLERANCE, X, assert_close, attend, loss

ORDERS = {
    "forward over reverse": lambda f: jax.jacfwd(jax.jacrev(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
}


@functools.cache
def exact_hessian(function):
    return jax.jit(jax.vmap(jax.hessian(functools.partial(loss, function))))(X)


# All of them for the operator's own rule. The rest are made of parts tested in every composition.
CASES = [("exact", order) for order in ORDERS]
CASES += [("qr", "reverse over reverse"), ("newton_schulz", "forward over reverse")]
CASES += [("dense", "forward over reverse"), ("dense", "reverse over forward")]


@pytest.mark.parametrize("method, order", CASES)
def test_hessian(method, order):
    hessian = ORDERS[order](functools.partial(loss, attend(method)))
    exact = exact_hessian(reference.reference(method))
    assert_close(jax.jit(jax.vmap(hessian))(X), exact, TOLERANCE)


def test_hessian_with_fewer_tokens_than_columns():
    x, unpack = reference.families(tokens=4)
    got, exact = (
        jax.jit(jax.vmap(jax.hessian(functools.partial(loss, f, unpack=unpack))))(x)
        for f in (attend("exact"), reference.dense)
    )
    assert_close(got, exact, TOLERANCE)


def test_second_order_by_differences():
    f = jax.jit(jax.vmap(functools.partial(loss, attend("exact"))))
    check_grads(f, (X,), order=2, modes=("fwd", "rev"))
