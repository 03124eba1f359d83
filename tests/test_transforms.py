"""The operator and its layers under JAX's transformations, against plain autodiff of a dense form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.flatten_util import ravel_pytree

from experiments import oracle
from osa_jax import orthogonal_attention
from osa_jax.nn import OrthogonalSelfAttention
from osa_jax.nn.linen import OrthogonalSelfAttention as LinenOrthogonalSelfAttention
from tests import reference
from tests.helpers import relative_error, value_tolerance
from tests.reference import METHODS, TOLERANCE, UNPACK, X, assert_close, attend, loss, output

RNG = np.random.default_rng(11)


def layers(attend, x):
    """Two layers in a scan, each a checkpoint in a cond, alpha in the carry."""
    q, k, v, alpha = UNPACK(x)

    @jax.checkpoint
    def layer(carry):
        y, alpha = carry
        return attend(q, k, y, alpha=alpha), alpha * 0.5

    def step(carry, active):
        return lax.cond(active, layer, lambda carry: carry, carry), None

    y, alpha = lax.scan(step, (v, alpha), jnp.array([True, False, True]))[0]
    return jnp.vdot(reference.WEIGHTS.astype(y.dtype), y)


def layers_unrolled(attend, x):
    q, k, v, alpha = UNPACK(x)
    y = attend(q, k, attend(q, k, v, alpha=alpha), alpha=alpha * 0.5)
    return jnp.vdot(reference.WEIGHTS, y)


@functools.cache
def exact_derivatives(function):
    """Value, Jacobian, gradient of the loss and of two layers, by family, of a dense reference."""
    value, scalar, stack = (functools.partial(f, function) for f in (output, loss, layers_unrolled))
    several = (value, jax.jacrev(value), jax.grad(scalar), jax.grad(stack))
    return jax.jit(lambda x: [jax.vmap(f)(x) for f in several])


@pytest.mark.parametrize("method", METHODS)
def test_first_order_in_both_modes(method):
    value, stack = (functools.partial(f, attend(method)) for f in (output, layers))
    several = (value, jax.jacfwd(value), jax.jacrev(value), jax.jacfwd(stack), jax.grad(stack))
    y, *derivatives = jax.jit(lambda x: [jax.vmap(f)(x) for f in several])(X)
    true_y, jacobian, _, stacked = exact_derivatives(reference.reference(method))(X)
    assert_close(y, true_y, value_tolerance(np.float64, reference.NU))
    exact = (jacobian, jacobian, stacked, stacked)
    for got, true in zip(derivatives, exact, strict=True):
        assert_close(got, true, TOLERANCE)


def test_every_other_transformation_gives_the_same_gradient():
    f = functools.partial(loss, attend("exact"))

    def by_sample(x):
        return lax.scan(lambda total, x: (total + f(x), None), 0.0, x)[0]

    def forward(x):
        return jax.vmap(jax.linearize(f, x)[1])(jnp.eye(len(x)))

    def backward(x):
        return jax.linear_transpose(jax.linearize(f, x)[1], x)(1.0)[0]

    @jax.jit
    def gradients(x):
        nested = jax.vmap(jax.vmap(jax.grad(f)))(x.reshape(2, 3, -1))
        return (
            nested.reshape(x.shape),
            jax.grad(lambda x: jnp.sum(jax.vmap(f)(x)))(x),
            jax.grad(by_sample)(x),
            jax.vmap(forward)(x),
            jax.vmap(backward)(x),
        )

    exact = exact_derivatives(reference.dense)(X)[2]
    for got in gradients(X):
        assert_close(got, exact, TOLERANCE)


def test_auto_is_dense_up_to_two_widths_of_tokens():
    def program(method, tokens, width=3):
        f = functools.partial(orthogonal_attention, method=method)
        q = jnp.zeros((tokens, 2, width))
        return jax.jit(jax.grad(lambda q: jnp.sum(f(q, q, q) ** 2))).lower(q).as_text()

    assert program("auto", 6) == program("dense", 6)
    assert program("auto", 7) == program("exact", 7)
    assert program("dense", 6) != program("exact", 6)


def test_alpha_as_argument_per_head_and_mapped():
    q, k, v, weights = (RNG.standard_normal((7, 2, width)) for width in (3, 3, 2, 2))
    alpha = np.array([0.3, -0.4])

    def f(alpha):
        return jnp.vdot(weights, orthogonal_attention(q, k, v, alpha=alpha))

    @jax.jit
    def gradients(alpha):
        return jax.grad(f)(alpha), jax.vmap(jax.grad(f))(alpha), jax.vmap(jax.jacfwd(f))(alpha)

    per_head, *mapped = gradients(alpha)
    exact = oracle.gradients(q, k, v, alpha, weights).alpha
    assert relative_error(per_head, exact) <= TOLERANCE
    both = [oracle.gradients(q, k, v, np.full(2, a), weights).alpha.sum() for a in alpha]
    for got in mapped:
        assert relative_error(got, both) <= TOLERANCE


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_cotangents_have_their_arguments_dtype(dtype):
    """Alone, and through a scan, where another dtype would be an error."""
    x = X.astype(dtype)
    alone, stack = (functools.partial(f, attend("exact")) for f in (loss, layers))
    derivatives = jax.jit(lambda x: [jax.vmap(jax.grad(f))(x) for f in (alone, stack)])
    exact = exact_derivatives(reference.dense)(x.astype(jnp.float64))[2:]
    # One rounding of the result; in the stack also of each layer's output, alpha and cotangent.
    for got, true, roundings in zip(derivatives(x), exact, (1, 4), strict=True):
        assert got.dtype == dtype
        assert_close(got, true, roundings * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("method", METHODS)
def test_mixed_dtypes_under_strict_promotion(method):
    dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32)
    shapes = ((7, 2, 3), (7, 2, 3), (7, 2, 2), (2,))
    arguments = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes, strict=True)]

    def pull(q, k, v, alpha):
        y, back = jax.vjp(lambda *args: attend(method)(*args[:3], alpha=args[3]), q, k, v, alpha)
        return y, attend(method)(q, k, v, alpha=0.5), *back(y)

    with jax.numpy_dtype_promotion("strict"):
        results = jax.eval_shape(pull, *arguments)
    assert [r.dtype for r in results] == [jnp.float32, jnp.float32, *dtypes]


# The layers


def nnx_layer():
    layer = OrthogonalSelfAttention(2, 8, qk_features=4, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    return state, nnx.to_pure_dict, lambda state, x: nnx.merge(graph, state)(x)


def linen_layer():
    layer = LinenOrthogonalSelfAttention(2, qk_features=4, param_dtype=jnp.float64)
    variables = jax.jit(layer.init)(jax.random.key(0), jnp.ones((5, 8)))
    return variables, lambda variables: variables["params"], layer.apply


def dense_layer(params, x):
    q, k, v = (jnp.einsum("nf,fhd->nhd", x, params[name]["kernel"]) for name in ("query", "key", "value"))
    y = reference.dense(q, k, v, alpha=params["alpha"])
    return jnp.einsum("nhd,hdf->nf", y, params["out"]["kernel"])


@pytest.mark.parametrize("make", [nnx_layer, linen_layer])
def test_layers(make):
    """What test_nn.py leaves: cond, linearize, scan in forward mode, and an exact Hessian.

    By parameters and tokens together, in three directions.
    """
    variables, params_of, apply = make()
    tokens, weights = RNG.standard_normal((2, 5, 8))
    start, unravel = ravel_pytree((variables, jnp.asarray(tokens)))
    directions = RNG.standard_normal((3, len(start)))

    def value(apply, t):
        variables, x = unravel(start + t @ directions)
        return jnp.vdot(weights, apply(variables, x))

    def exact(t):
        return value(lambda variables, x: dense_layer(params_of(variables), x), t)

    f = functools.partial(value, apply)

    def chosen(t):
        return lax.cond(t[0] == 0, f, lambda t: 0.0, t)

    def scanned(t):
        return lax.scan(lambda total, _: (total + f(t), None), 0.0, length=2)[0] / 2

    @jax.jit
    def derivatives(t):
        linear = jax.linearize(f, t)[1]
        gradients = jax.grad(chosen)(t), jax.jacfwd(scanned)(t), jax.vmap(linear)(jnp.eye(3))
        return gradients, jax.hessian(f)(t)

    gradients, hessian = derivatives(jnp.zeros(3))
    gradient = jax.jit(jax.grad(exact))(jnp.zeros(3))
    for got in gradients:
        assert relative_error(got, gradient) <= TOLERANCE
    assert relative_error(hessian, jax.jit(jax.hessian(exact))(jnp.zeros(3))) <= TOLERANCE
