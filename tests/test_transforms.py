"""The operator and its layers under JAX's transformations, to second order and on singular inputs.

The reference is plain autodiff of a dense form: exp(S) by its Taylor series, and for Newton-Schulz
the paper's iteration as it is written.
"""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.test_util import check_grads

from experiments import oracle
from osa_jax import orthogonal_attention
from osa_jax.nn import OrthogonalSelfAttention
from osa_jax.nn.linen import OrthogonalSelfAttention as LinenOrthogonalSelfAttention
from tests.helpers import gradient_tolerance, relative_error, value_tolerance

N, D, E, NU, STEPS = 7, 3, 2, 2.0, 2
METHODS = {
    "exact": {"method": "exact"},
    "qr": {"method": "qr"},
    "dense": {"method": "dense"},
    "newton_schulz": {"method": "newton_schulz", "num_iters": STEPS, "coefficients": "cubic"},
}
FAMILIES = ("generic", "K = Q", "K = Q + 1e-4 noise", "duplicate tokens", "dead column", "zero")
FIRST = gradient_tolerance(np.float64, NU)
SECOND = 10 * FIRST
RNG = np.random.default_rng(11)
WEIGHTS = RNG.integers(-15, 16, (N, 1, E)) / 8  # exact in every dtype

each_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    """These tests compile large programs and run each of them once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def attend(method):
    return functools.partial(orthogonal_attention, **METHODS[method])


def taylor(s):
    eye = jnp.broadcast_to(jnp.eye(s.shape[-1]), s.shape)
    return lax.scan(lambda a, k: (eye + s @ a / k, None), eye, jnp.arange(25.0, 0.0, -1.0))[0]


def skew(q, k, alpha):
    product = jnp.einsum("nhd,mhd->hnm", q, k)
    return alpha[:, None, None] / np.sqrt(q.shape[-1]) * (product - product.mT)


def reference_dense(q, k, v, *, alpha):
    return jnp.einsum("hnm,mhe->nhe", taylor(skew(q, k, alpha)), v)


def reference_newton_schulz(q, k, v, *, alpha):
    b = jnp.concatenate([q, k], -1).swapaxes(0, 1)
    square = jnp.sum(b**2, (1, 2), keepdims=True)
    b = b / jnp.sqrt(jnp.where(square > 0, square, 1.0))
    for _ in range(STEPS):
        b = 1.5 * b - 0.5 * b @ (b.mT @ b)
    turn = taylor(b.mT @ skew(q, k, alpha) @ b) - jnp.eye(b.shape[-1])[None]
    return v + jnp.einsum("hnr,hrs,hms,mhe->nhe", b, turn, b, v)


def reference(method):
    return reference_newton_schulz if method == "newton_schulz" else reference_dense


# One head's query, key, value and alpha as one vector, for each family.


def arguments(family, tokens):
    if family == "zero":
        q = k = np.zeros((tokens, D))
    else:
        q, k = oracle.query_key(np.random.default_rng(3), family, tokens, D)
        scale = np.sqrt(NU * np.sqrt(D)) / np.linalg.norm(np.concatenate([q, k], 1), 2)
        q, k = q * scale, k * scale
    return q[:, None], k[:, None], RNG.standard_normal((tokens, 1, E)), np.array([0.9])


def families(tokens=N):
    vectors, unpack = zip(*(ravel_pytree(arguments(f, tokens)) for f in FAMILIES), strict=True)
    return jnp.stack(vectors), unpack[0]


X, UNPACK = families()


def unpacked(x):
    """The four arguments in the dtype of the vector."""
    return [part.astype(x.dtype) for part in UNPACK(x.astype(X.dtype))]


def output(attend, x, unpack=unpacked):
    q, k, v, alpha = unpack(x)
    return attend(q, k, v, alpha=alpha)


def loss(attend, x, unpack=unpacked):
    y = output(attend, x, unpack)
    return jnp.vdot(WEIGHTS[: len(y)].astype(y.dtype), y)


def layers(attend, x):
    """Two layers in a scan, each a checkpoint in a cond, alpha in the carry."""
    q, k, v, alpha = unpacked(x)

    @jax.checkpoint
    def layer(carry):
        y, alpha = carry
        return attend(q, k, y, alpha=alpha), alpha * 0.5

    def step(carry, active):
        return lax.cond(active, layer, lambda carry: carry, carry), None

    y, alpha = lax.scan(step, (v, alpha), jnp.array([True, False, True]))[0]
    return jnp.vdot(WEIGHTS.astype(y.dtype), y)


def layers_unrolled(attend, x):
    q, k, v, alpha = unpacked(x)
    return jnp.vdot(WEIGHTS, attend(q, k, attend(q, k, v, alpha=alpha), alpha=alpha * 0.5))


def close(got, expected, tolerance):
    """Family by family."""
    for one, true, family in zip(got, expected, FAMILIES, strict=True):
        assert relative_error(one, true) <= tolerance, (family, relative_error(one, true))


@functools.cache
def expected(reference):
    """Value, Jacobian, gradient of the loss and of the layers, Hessian of the loss; by family."""
    value, scalar = functools.partial(output, reference), functools.partial(loss, reference)
    stack = functools.partial(layers_unrolled, reference)
    several = (value, jax.jacrev(value), jax.grad(scalar), jax.grad(stack), jax.hessian(scalar))
    return jax.jit(lambda x: [jax.vmap(f)(x) for f in several])(X)


@each_method
def test_first_order_in_both_modes(method):
    value, stack = (functools.partial(f, attend(method)) for f in (output, layers))
    several = (value, jax.jacfwd(value), jax.jacrev(value), jax.jacfwd(stack), jax.grad(stack))
    got = jax.jit(lambda x: [jax.vmap(f)(x) for f in several])(X)
    true_value, jacobian, _, true_stack, _ = expected(reference(method))
    close(got[0], true_value, value_tolerance(np.float64, NU))
    for one, true in zip(got[1:], (jacobian, jacobian, true_stack, true_stack), strict=True):
        close(one, true, FIRST)


def test_every_transformation_gives_the_same_gradient():
    f = functools.partial(loss, attend("exact"))

    def summed(x):
        return lax.scan(lambda total, x: (total + f(x), None), 0.0, x)[0]

    def transposed(x):
        linear = jax.linearize(f, x)[1]
        return jax.linear_transpose(linear, x)(1.0)[0]

    def linearized(x):
        return jax.vmap(jax.linearize(f, x)[1])(jnp.eye(len(x)))

    @jax.jit
    def everything(x, active):
        def chosen(x):
            return lax.cond(active, f, lambda x: 0.0, x)

        return {
            "vmap(vmap(grad))": jax.vmap(jax.vmap(jax.grad(f)))(x.reshape(2, 3, -1)).reshape(x.shape),
            "grad(vmap)": jax.grad(lambda x: jnp.sum(jax.vmap(f)(x)))(x),
            "checkpoint": jax.vmap(jax.grad(jax.checkpoint(f)))(x),
            "scan, reverse": jax.grad(summed)(x),
            "scan, forward": jax.jacfwd(summed)(x),
            "cond, reverse": jax.vmap(jax.grad(chosen))(x),
            "cond, forward": jax.vmap(jax.jacfwd(chosen))(x),
            "linearize": jax.vmap(linearized)(x),
            "linear_transpose": jax.vmap(transposed)(x),
        }

    gradient = expected(reference_dense)[2]
    for got in everything(X, True).values():
        close(got, gradient, FIRST)


ORDERS = {
    "forward over reverse": lambda f: jax.jacfwd(jax.jacrev(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
}
CHECKED = [("exact", order) for order in ORDERS]
CHECKED += [(method, order) for method in list(METHODS)[1:] for order in list(ORDERS)[:2]]


@pytest.mark.parametrize("method, order", CHECKED)
def test_hessian(method, order):
    hessian = ORDERS[order](functools.partial(loss, attend(method)))
    close(jax.jit(jax.vmap(hessian))(X), expected(reference(method))[4], SECOND)


def test_hessian_with_fewer_tokens_than_columns():
    x, unpack = families(tokens=4)
    got, true = (
        jax.jit(jax.vmap(jax.hessian(functools.partial(loss, f, unpack=unpack))))(x)
        for f in (attend("exact"), reference_dense)
    )
    close(got, true, SECOND)


def test_second_order_by_differences():
    f = jax.jit(jax.vmap(functools.partial(loss, attend("exact"))))
    check_grads(f, (X,), order=2, modes=("fwd", "rev"))


def test_auto_is_dense_up_to_two_widths_of_tokens():
    def program(method, tokens):
        f = functools.partial(orthogonal_attention, method=method)
        q = jnp.zeros((tokens, 2, D))
        return jax.jit(jax.grad(lambda q: jnp.sum(f(q, q, q) ** 2))).lower(q).as_text()

    assert program("auto", 2 * D) == program("dense", 2 * D)
    assert program("auto", 2 * D + 1) == program("exact", 2 * D + 1)
    assert program("dense", 2 * D) != program("exact", 2 * D)


def test_alpha_scalar_per_head_and_mapped():
    q, k, v, _ = (RNG.standard_normal((N, 2, width)) for width in (D, D, E, 1))
    weights = RNG.standard_normal((N, 2, E))

    def f(alpha):
        return jnp.vdot(weights, orthogonal_attention(q, k, v, alpha=alpha))

    alpha = np.array([0.3, -0.4])
    exact = oracle.gradients(q, k, v, alpha, weights).alpha
    assert relative_error(jax.jit(jax.grad(f))(alpha), exact) <= FIRST
    equal = [oracle.gradients(q, k, v, np.full(2, a), weights).alpha.sum() for a in alpha]
    assert relative_error(jax.jit(jax.vmap(jax.grad(f)))(alpha), equal) <= FIRST
    assert relative_error(jax.jit(jax.vmap(jax.jacfwd(f)))(alpha), equal) <= FIRST


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_cotangents_in_their_arguments_dtype(dtype):
    """Alone and as the carry of a scan, where another dtype would be an error."""
    x = X[:2].astype(dtype)
    scalar, stack = (functools.partial(f, attend("exact")) for f in (loss, layers))
    true_scalar = functools.partial(loss, reference_dense)
    true_stack = functools.partial(layers_unrolled, reference_dense)
    eps = float(jnp.finfo(dtype).eps)
    for f, true, tolerance in ((scalar, true_scalar, eps), (stack, true_stack, 4 * eps)):
        got = jax.jit(jax.vmap(jax.grad(f)))(x)
        assert got.dtype == dtype
        close_to = jax.vmap(jax.grad(true))(x.astype(np.float64))
        for one, exact in zip(got, close_to, strict=True):
            assert relative_error(one, exact) <= tolerance


@each_method
def test_mixed_dtypes_under_strict_promotion(method):
    dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32)
    shapes = ((2, N, 2, D), (2, N, 2, D), (2, N, 2, E), (2,))
    structs = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]

    def pull(q, k, v, alpha):
        y, vjp = jax.vjp(lambda q, k, v, a: attend(method)(q, k, v, alpha=a), q, k, v, alpha)
        return y, attend(method)(q, k, v, alpha=0.5), *vjp(y)

    with jax.numpy_dtype_promotion("strict"):
        results = jax.eval_shape(pull, *structs)
    assert [r.dtype for r in results] == [jnp.float32, jnp.float32, *dtypes]


# Samples, tokens and heads that must not see each other


@functools.cache
def pull(method):
    """Value and cotangents of [B, N, H, .]."""

    @jax.jit
    def run(q, k, v, alpha, y_bar):
        y, vjp = jax.vjp(lambda *args: attend(method)(*args[:3], alpha=args[3]), q, k, v, alpha)
        return y, *vjp(y_bar)

    return run


BATCH = [RNG.standard_normal((3, N, 2, width)) for width in (D, D, E)]
BATCH += [np.array([0.3, -0.2]), RNG.standard_normal((3, N, 2, E))]


@each_method
@pytest.mark.parametrize("fill", [np.nan, np.inf, 0.0, 30.0])
def test_a_sample_does_not_touch_the_others(method, fill):
    """Bit for bit, with the sample bad, zero or in need of more doublings than the others."""
    batch = [x.copy() for x in BATCH]
    for x in batch[:3]:
        x[1, :, 0] = fill * np.where(np.isfinite(fill), x[1, :, 0], 1)
    clean, other = (pull(method)(*args) for args in (BATCH, batch))
    for before, after in zip(clean, other, strict=True):
        if before.ndim == 1:
            np.testing.assert_array_equal(before[1], after[1])
            continue
        np.testing.assert_array_equal(before[::2], after[::2])
        np.testing.assert_array_equal(before[1, :, 1], after[1, :, 1])
        if fill in (0.0, 30.0):
            assert np.isfinite(after).all()
    if fill == 0.0:
        for x_bar, true in zip(other[1:4], (0, 0, BATCH[4][1, :, 0]), strict=True):
            np.testing.assert_array_equal(x_bar[1, :, 0], np.broadcast_to(true, x_bar[1, :, 0].shape))


@each_method
@pytest.mark.parametrize("eager", [False, True])
def test_debug_nans_is_silent_on_finite_input(method, eager):
    """Also op by op, which sees what the branches not taken compute; and the two agree."""
    batch = [x.copy() for x in BATCH]
    batch[0][1], batch[1][2] = 0, batch[0][2]
    expected = pull(method)(*batch)
    with jax.debug_nans(True), jax.disable_jit(eager):
        got = pull(method)(*batch)
    for one, other in zip(got, expected, strict=True):
        assert relative_error(one, other) <= FIRST


# What the program holds


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def programs(method, tokens=37):
    """The jaxprs of value, gradient and Hessian-vector product."""
    q, k, v = (jnp.zeros((tokens, 2, width), jnp.float32) for width in (D, D, E))

    def f(*args):
        return jnp.sum(attend(method)(*args[:3], alpha=args[3]) ** 2)

    args = (q, k, v, jnp.ones(2, jnp.float32))
    grad = jax.grad(f, (0, 1, 2, 3))
    for program in (f, grad, lambda *args: jax.jvp(grad, args, args)[1]):
        yield list(equations(jax.make_jaxpr(program)(*args).jaxpr))


def has_two_token_axes(found):
    shapes = [v.aval.shape for e in found for v in (*e.invars, *e.outvars)]
    return any(shape.count(37) > 1 for shape in shapes)


@each_method
def test_no_array_has_two_token_axes(method):
    for found in programs(method):
        assert has_two_token_axes(found) == (method == "dense")


@each_method
def test_every_product_asks_for_the_highest_precision(method):
    with jax.default_matmul_precision("bfloat16"):
        for found in programs(method):
            products = [e for e in found if e.primitive.name == "dot_general"]
            assert len(products) > 5
            for equation in products:
                assert set(equation.params["precision"]) == {lax.Precision.HIGHEST}


def test_global_precision_changes_nothing():
    q, k, v = (x.astype(np.float32) for x in BATCH[:3])
    expected = orthogonal_attention(q, k, v, alpha=0.3)
    with jax.default_matmul_precision("bfloat16"):
        got = orthogonal_attention(q, k, v, alpha=0.3)
    np.testing.assert_array_equal(got, expected)


# The layers


def nnx_layer():
    layer = OrthogonalSelfAttention(2, 8, qk_features=4, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    return params, lambda params, x: nnx.merge(graph, params)(x)


def linen_layer():
    layer = LinenOrthogonalSelfAttention(2, qk_features=4, param_dtype=jnp.float64)
    return jax.jit(layer.init)(jax.random.key(0), jnp.ones((5, 8))), layer.apply


@pytest.mark.parametrize("make", [nnx_layer, linen_layer])
def test_layers(make):
    """What test_nn.py leaves: linearize, cond, scan in forward mode, and the Hessian."""
    params, apply = make()
    tokens, weights, u = RNG.standard_normal((3, 5, 8))
    flat, unravel = ravel_pytree((params, jnp.asarray(tokens)))
    small = ravel_pytree(jax.tree.map(jnp.zeros_like, (params, jnp.asarray(u))))[0]
    along = small + RNG.standard_normal(small.shape)

    def f(x):
        return jnp.vdot(weights, apply(*unravel(x)))

    def f_true(x):
        return f(x)

    assert f_true is not None and along is not None and flat is not None
