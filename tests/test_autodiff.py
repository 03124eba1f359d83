"""`custom_vjp` under every transformation, against plain autodiff of the same functions."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from osa_jax.autodiff import custom_vjp
from tests.helpers import run_python


class Example(NamedTuple):
    """A function with hand-written rules, the same function without, and its arguments."""

    custom: Any
    plain: Any
    args: tuple


def scalar_example():
    @custom_vjp
    def fun(x):
        return jnp.sin(x) * x**2

    def slope(x):
        return jnp.cos(x) * x**2 + 2 * x * jnp.sin(x)

    fun.defvjp(lambda x: (fun(x), x), lambda x, ct: (slope(x) * ct,))
    fun.defjvp(lambda x, tangents: slope(x) * tangents[0])
    return Example(fun, fun.fun, (jnp.float64(0.7),))


def matrix_example():
    """Two arguments and two outputs of different shapes."""

    @custom_vjp
    def fun(a, x):
        return a @ jnp.tanh(x), jnp.sum(a**2)

    def fwd(a, x):
        return fun(a, x), (a, jnp.tanh(x))

    def bwd(residuals, cts):
        a, t = residuals
        return jnp.outer(cts[0], t) + 2 * a * cts[1], (a.T @ cts[0]) * (1 - t**2)

    def jvp(residuals, tangents):
        (a, t), (a_dot, x_dot) = residuals, tangents
        return a_dot @ t + a @ ((1 - t**2) * x_dot), 2 * jnp.vdot(a, a_dot)

    fun.defvjp(fwd, bwd)
    fun.defjvp(jvp)
    rng = np.random.default_rng(0)
    return Example(fun, fun.fun, (jnp.asarray(rng.normal(size=(3, 2))), jnp.asarray([0.3, -0.8])))


def tree_example():
    """Trees of arguments, residuals and outputs, integer and boolean leaves, a static option."""

    @custom_vjp(nondiff_argnames=("power",))
    def fun(params, scale, *, power=2):
        picked = jnp.where(params["mask"], params["w"][params["index"]], 0)
        out = picked**power * scale
        return {"out": out, "more": [jnp.exp(scale), params["index"]]}

    def fwd(params, scale, *, power):
        return fun(params, scale, power=power), {"params": params, "scale": [scale]}

    def bwd(residuals, cts, *, power):
        params, (scale,) = residuals["params"], residuals["scale"]
        picked = jnp.where(params["mask"], params["w"][params["index"]], 0)
        ct = cts["out"] * power * picked ** (power - 1) * scale
        w_bar = jnp.zeros_like(params["w"]).at[params["index"]].add(jnp.where(params["mask"], ct, 0))
        scale_bar = jnp.sum(cts["out"] * picked**power) + cts["more"][0] * jnp.exp(scale)
        return {"w": w_bar, "mask": None, "index": None}, scale_bar

    def jvp(residuals, tangents, *, power):
        params, (scale,) = residuals["params"], residuals["scale"]
        w_dot, scale_dot = tangents[0]["w"], tangents[1]
        picked = jnp.where(params["mask"], params["w"][params["index"]], 0)
        picked_dot = jnp.where(params["mask"], w_dot[params["index"]], 0)
        out_dot = power * picked ** (power - 1) * picked_dot * scale + picked**power * scale_dot
        return {"out": out_dot, "more": [jnp.exp(scale) * scale_dot, None]}

    fun.defvjp(fwd, bwd)
    fun.defjvp(jvp)
    params = {
        "w": jnp.asarray([0.4, -1.2, 0.9]),
        "mask": jnp.asarray([True, False, True, True]),
        "index": jnp.asarray([0, 1, 2, 0]),
    }
    return Example(
        lambda p, s: fun(p, s, power=3),
        lambda p, s: fun.fun(p, s, power=3),
        (params, jnp.float64(0.6)),
    )


def mixed_example():
    """float32 beside float64, each derivative in its own dtype."""

    @custom_vjp
    def fun(x, y):
        return x.astype(jnp.float64) * jnp.sin(y), (y**2).astype(jnp.float32)

    def bwd(residuals, cts):
        x, y = residuals
        y_bar = cts[0] * x * jnp.cos(y) + 2 * y * cts[1].astype(jnp.float64)
        return (cts[0] * jnp.sin(y)).astype(jnp.float32), y_bar

    def jvp(residuals, tangents):
        x, y = residuals
        first = tangents[0].astype(jnp.float64) * jnp.sin(y) + x * jnp.cos(y) * tangents[1]
        return first, (2 * y * tangents[1]).astype(jnp.float32)

    fun.defvjp(lambda x, y: (fun(x, y), (x, y)), bwd)
    fun.defjvp(jvp)
    return Example(fun, fun.fun, (jnp.float32([0.5, 2.0]), jnp.float64([0.3, 1.1])))


EXAMPLES = [matrix_example, tree_example, mixed_example]


def is_inexact(x):
    return jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact)


def as_vector_function(fun, args):
    """`fun` from the vector of its differentiable numbers to the vector of its results."""
    leaves, treedef = jax.tree.flatten(args)
    start, unravel = ravel_pytree([x for x in leaves if is_inexact(x)])

    def vector_function(flat):
        moving = iter(unravel(flat))
        full = treedef.unflatten([next(moving) if is_inexact(x) else x for x in leaves])
        return ravel_pytree([x for x in jax.tree.leaves(fun(*full)) if is_inexact(x)])[0]

    return vector_function, start.astype(jnp.float64)


def scan_of(fun):
    def loop(x):
        return jax.lax.scan(lambda x, _: (x + 0.1 * jnp.sum(fun(x)), jnp.sum(x)), x, length=3)

    return lambda x: loop(x)[0]


def fori_of(fun):
    return lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x + 0.1 * jnp.sum(fun(x)), x)


def while_of(fun):
    def step(state):
        return state[0] + 1, state[1] + 0.1 * jnp.sum(fun(state[1]))

    return lambda x: jax.lax.while_loop(lambda state: state[0] < 3, step, (0, x))[1]


def cond_of(fun):
    def branch(x):
        return jax.lax.cond(x[0] > 0, lambda x: jnp.sum(fun(x)), lambda x: jnp.sum(x), x)

    return lambda x: branch(x) + branch(-x)


def transformations(fun, x):
    """name -> what this transformation of `fun` gives at `x`."""
    v, weights = jnp.cos(jnp.arange(x.size) + 1.0), jnp.sin(jnp.arange(fun(x).size) + 1.0)
    batch = jnp.stack([x, 0.5 * x + v])

    def scalar(x):
        return jnp.vdot(weights, jnp.sin(fun(x)))

    def batched(batch):
        return jnp.sum(jax.vmap(scalar)(batch) ** 2)

    linear = jax.linearize(fun, x)[1]
    fwd, rev = jax.jacfwd, jax.jacrev
    results = {
        "call": fun(x),
        "grad": jax.grad(scalar)(x),
        "jacfwd": fwd(fun)(x),
        "jacrev": rev(fun)(x),
        "jvp": jax.jvp(fun, (x,), (v,)),
        "vjp": jax.vjp(fun, x)[1](weights),
        "linearize": linear(v),
        "linear_transpose": jax.linear_transpose(linear, x)(weights),
        "jvp of vjp": jax.jvp(lambda x, w: jax.vjp(fun, x)[1](w), (x, weights), (v, weights)),
        "vjp of jvp": jax.vjp(lambda x, v: jax.jvp(fun, (x,), (v,))[1], x, v)[1](weights),
        "vmap": jax.vmap(fun)(batch),
        "vmap at the end": jax.vmap(fun, in_axes=-1, out_axes=-1)(batch.T),
        "vmap of grad": jax.vmap(jax.grad(scalar))(batch),
        "grad of vmap": jax.grad(batched)(batch),
        "vmap of jvp, tangents alone": jax.vmap(lambda v: jax.jvp(fun, (x,), (v,))[1])(batch),
        "vmap of jvp, primals alone": jax.vmap(lambda x: jax.jvp(fun, (x,), (v,))[1])(batch),
        "vmap of vjp, cotangents alone": jax.vmap(jax.vjp(fun, x)[1])(jnp.stack([weights] * 2)),
        "vmap of vmap of grad": jax.vmap(jax.vmap(jax.grad(scalar)))(batch[None]),
        "jacfwd of vmap": fwd(jax.vmap(fun))(batch),
        "hessian of vmap": jax.hessian(batched)(batch),
        "jit inside": jax.grad(jax.jit(scalar))(x),
        "checkpoint, reverse": jax.grad(jax.checkpoint(scalar))(x),
        "checkpoint, forward": fwd(jax.checkpoint(scalar))(x),
        "scan, reverse": rev(scan_of(fun))(x),
        "scan, forward": fwd(scan_of(fun))(x),
        "checkpoint in scan": rev(scan_of(jax.checkpoint(fun)))(x),
        "fori_loop, forward": fwd(fori_of(fun))(x),
        "fori_loop, reverse": rev(fori_of(fun))(x),
        "while_loop, forward": fwd(while_of(fun))(x),
        "cond, reverse": jax.grad(cond_of(fun))(x),
        "cond, forward": fwd(cond_of(fun))(x),
        "vmap of cond": jax.vmap(jax.grad(cond_of(fun)))(batch),
        "third order, forward": jax.jvp(lambda x: jax.hessian(scalar)(x), (x,), (v,))[1],
        "third order, reverse": jax.grad(lambda x: jnp.sum(rev(jax.grad(scalar))(x) ** 2))(x),
    }
    for (outer, a), (inner, b) in itertools.product(((fwd, "fwd"), (rev, "rev")), repeat=2):
        results[f"{a} over {b}"] = outer(inner(scalar))(x)
        results[f"{a} over {b} of scan"] = outer(inner(lambda x: jnp.sum(scan_of(fun)(x))))(x)
    return results


@pytest.mark.parametrize("example", EXAMPLES)
def test_transformations_equal_plain_autodiff(example):
    custom, plain, args = example()
    rtol = 2e-6 if example is mixed_example else 1e-12
    results = [
        jax.jit(lambda x, f=f: transformations(f, x))(x)
        for f, x in (as_vector_function(f, args) for f in (custom, plain))
    ]
    for name in results[1]:
        for actual, wanted in zip(*(jax.tree.leaves(r[name]) for r in results), strict=True):
            scale = max(1.0, float(jnp.max(jnp.abs(wanted))))
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=rtol * scale, err_msg=name)


@pytest.mark.parametrize("disable_jit", [False, True])
def test_eager_mode(disable_jit):
    custom, plain, (x,) = scalar_example()
    with jax.disable_jit(disable_jit), jax.checking_leaks():
        for transform in (jax.grad, jax.jacfwd, lambda f: jax.jacfwd(jax.grad(f))):
            np.testing.assert_allclose(transform(custom)(x), transform(plain)(x), rtol=1e-14)
        xs = jnp.stack([x, 2 * x])
        slopes = jax.vmap(jax.grad(plain))(xs)
        np.testing.assert_allclose(jax.vmap(jax.grad(custom))(xs), slopes, rtol=1e-14)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (2, 1), (1, None)])
def test_partly_batched_arguments(axes):
    custom, plain, (a, x) = matrix_example()
    stacked = tuple(
        arg if axis is None else jnp.stack([arg, 2 * arg, arg - 1], axis)
        for arg, axis in zip((a, x), axes, strict=True)
    )

    def results(fun):
        def scalar(a, x):
            out, total = fun(a, x)
            return jnp.sum(jnp.sin(out)) * total

        mapped = [
            jax.vmap(transform, axes)(*stacked)
            for transform in (fun, jax.grad(scalar, (0, 1)), jax.jacfwd(scalar, (0, 1)))
        ]
        second = jax.vmap(jax.jacfwd(jax.grad(scalar, 1), 0), axes)(*stacked)
        grad = jax.grad(lambda *args: jnp.sum(jax.vmap(scalar, axes)(*args)), (0, 1))(*stacked)
        return mapped, second, grad

    actual, wanted = (jax.jit(results, static_argnums=0)(f) for f in (custom, plain))
    jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=1e-12), actual, wanted)


def told_apart():
    """The identity with false rules: forward mode says 2, reverse mode says 3."""

    @custom_vjp
    def fun(x):
        return 1.0 * x

    fun.defvjp(lambda x: (1.0 * x, None), lambda _, ct: (3.0 * ct,))
    fun.defjvp(lambda _, tangents: 2.0 * tangents[0])
    return fun


def test_each_mode_runs_its_own_rule():
    fun, x = told_apart(), jnp.float64(1.0)
    for wrap in (lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda x: jax.vmap(f)(x[None])[0]):
        assert jax.jacfwd(wrap(fun))(x) == 2
        assert jax.jacrev(wrap(fun))(x) == 3
    linear = jax.linearize(fun, x)[1]
    assert linear(x) == 2
    assert jax.linear_transpose(linear, x)(x) == (3.0,)
    three = scan_of(lambda x: 10 * (fun(x) - x) + x)  # x + 0.1 x + (fun(x) - x)
    assert jax.jacfwd(three)(x) == pytest.approx((1 + 0.1 + 1) ** 3)
    assert jax.jacrev(three)(x) == pytest.approx((1 + 0.1 + 2) ** 3)


def test_rules_are_called_as_needed():
    calls = []

    @custom_vjp
    def fun(x):
        calls.append("fun")
        return x**2

    def fwd(x):
        calls.append("fwd")
        return x**2, x

    def bwd(x, ct):
        calls.append("bwd")
        return (2 * x * ct,)

    def jvp(x, tangents):
        calls.append("jvp")
        return 2 * x * tangents[0]

    fun.defvjp(fwd, bwd)
    fun.defjvp(jvp)
    fun(3.0)
    assert calls == ["fun"]
    for mode, rule in ((jax.grad, "bwd"), (jax.jacfwd, "jvp")):
        calls.clear()
        assert mode(fun)(3.0) == 6
        assert "fun" not in calls
        assert calls.count("fwd") == 1
        assert rule in calls


def test_one_of_two_outputs():
    custom, plain, args = matrix_example()
    for pick in (0, 1):
        actual, wanted = (
            jax.grad(lambda *args, f=f, i=pick: jnp.sum(f(*args)[i] ** 2), (0, 1))(*args) for f in (custom, plain)
        )
        jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=1e-13), actual, wanted)


def test_cotangents_have_their_arguments_dtype():
    custom, _, args = mixed_example()
    out, pullback = jax.vjp(custom, *args)
    assert [x.dtype for x in pullback(out)] == [jnp.float32, jnp.float64]
    _, dot = jax.jvp(custom, args, args)
    assert [x.dtype for x in dot] == [jnp.float64, jnp.float32]


def test_integers_have_float0_tangents_and_cotangents():
    custom, _, (params, scale) = tree_example()
    out, pullback = jax.vjp(custom, params, scale)
    params_bar, _ = pullback({"out": out["out"], "more": [scale, np.zeros(4, jax.dtypes.float0)]})
    assert params_bar["mask"].dtype == params_bar["index"].dtype == jax.dtypes.float0
    zeros = {k: np.zeros(params[k].shape, jax.dtypes.float0) for k in ("mask", "index")}
    _, dot = jax.jvp(custom, (params, scale), ({"w": params["w"], **zeros}, scale))
    assert dot["more"][1].dtype == jax.dtypes.float0
    grads = jax.grad(lambda p: jnp.sum(custom(p, scale)["out"]), allow_int=True)(params)
    assert grads["index"].dtype == jax.dtypes.float0


def test_none_stands_for_a_zero_cotangent():
    @custom_vjp
    def fun(x, tree):
        return x * tree["a"]

    fun.defvjp(lambda x, tree: (x * tree["a"], tree["a"]), lambda a, ct: (a * ct, None))
    x_bar, tree_bar = jax.grad(fun, (0, 1))(2.0, {"a": 3.0})
    assert (x_bar, tree_bar) == (3, {"a": 0})


def scaled_by_closure(t):
    @custom_vjp
    def fun(x):
        return t * jnp.sin(x)

    fun.defvjp(lambda x: (fun(x), x), lambda x, ct: (t * jnp.cos(x) * ct,))
    fun.defjvp(lambda x, tangents: t * jnp.cos(x) * tangents[0])
    return fun


def test_rules_may_close_over_traced_values():
    x, t = jnp.float64(0.4), jnp.float64(3.0)
    slope, curvature = t * jnp.cos(x), -t * jnp.sin(x)

    def first(mode):
        return lambda t, x: mode(scaled_by_closure(t))(x)

    def through_scan(mode):
        def body(t, _):
            return t + 1, mode(scaled_by_closure(t))(x)

        return jax.lax.scan(body, t, length=3)[1]

    for mode in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(jax.jit(first(mode))(t, x), slope, rtol=1e-14)
        ts, xs = jnp.stack([t, 2 * t]), jnp.stack([x, x])
        for axes, arguments in (((0, None), (ts, x)), ((None, 0), (t, xs)), ((0, 0), (ts, xs))):
            mapped = jax.jit(jax.vmap(first(mode), axes))(*arguments)
            np.testing.assert_allclose(mapped, arguments[0] * jnp.cos(arguments[1]), rtol=1e-14)
        np.testing.assert_allclose(through_scan(mode), (t + jnp.arange(3)) * jnp.cos(x), rtol=1e-14)
    for outer, inner in itertools.product((jax.jacfwd, jax.jacrev), repeat=2):
        second = jax.jit(lambda t, x, o=outer, i=inner: o(i(scaled_by_closure(t)))(x))(t, x)
        np.testing.assert_allclose(second, curvature, rtol=1e-14)


def test_a_pullback_leaves_jit():
    custom, plain, args = matrix_example()
    out, pullback = jax.jit(lambda *args: jax.vjp(custom, *args))(*args)
    wanted = jax.vjp(plain, *args)[1](out)
    jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=1e-13), pullback(out), wanted)


def test_arguments_by_name_defaults_and_variadic():
    @custom_vjp(nondiff_argnames=("power",))
    def fun(x, y=2.0, *, power=3):
        return x**power * y

    def bwd(residuals, ct, *, power):
        x, y = residuals
        return power * x ** (power - 1) * y * ct, x**power * ct

    fun.defvjp(lambda x, y, *, power: (fun(x, y, power=power), (x, y)), bwd)
    assert jax.grad(fun)(3.0) == 54
    assert jax.grad(lambda y: fun(y=y, x=3.0, power=2))(5.0) == 9

    @custom_vjp
    def product(*factors):
        return factors[0] * factors[1]

    product.defvjp(lambda a, b: (a * b, (a, b)), lambda r, ct: (r[1] * ct, r[0] * ct))
    assert jax.grad(product, (0, 1))(2.0, 5.0) == (5, 2)


def test_looks_like_the_function_it_wraps():
    @custom_vjp
    def documented(x):
        """Says what it does."""
        return x

    assert documented.__name__ == "documented"
    assert documented.__doc__ == "Says what it does."


# Refusals


def without_jvp():
    @custom_vjp
    def square(x):
        return x**2

    square.defvjp(lambda x: (x**2, x), lambda x, ct: (2 * x * ct,))
    return square


def test_reverse_mode_alone():
    square = without_jvp()
    batch = jnp.arange(3.0)
    assert jax.grad(square)(3.0) == 6
    assert jax.hessian(square)(3.0) == 2  # forward mode of the rules, not of the function
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(square)))(batch), 2 * batch)
    np.testing.assert_allclose(jax.grad(lambda b: jnp.sum(jax.vmap(square)(b)))(batch), 2 * batch)
    np.testing.assert_allclose(jax.grad(scan_of(square))(1.0), jax.grad(scan_of(square.fun))(1.0))


@pytest.mark.parametrize(
    "transform",
    [
        jax.jacfwd,
        lambda f: jax.jacrev(jax.jacfwd(f)),
        lambda f: jax.jit(jax.jacfwd(f)),
        lambda f: lambda x: jax.vmap(jax.jacfwd(f))(x[None]),
        lambda f: jax.jacfwd(scan_of(f)),
    ],
    ids=["jacfwd", "jacrev of jacfwd", "jit", "vmap", "scan"],
)
def test_forward_mode_without_its_rule_names_the_remedy(transform):
    with pytest.raises(TypeError, match=r"square.*give one with square\.defjvp\(jvp\)"):
        transform(without_jvp())(jnp.float64(3.0))


def test_a_call_before_defvjp_names_the_remedy():
    @custom_vjp
    def square(x):
        return x**2

    with pytest.raises(AttributeError, match=r"square: call \.defvjp\(fwd, bwd\)"):
        square(3.0)


def test_unknown_static_option():
    with pytest.raises(ValueError, match="nondiff_argnames .*'steps'.* are not arguments of square"):

        @custom_vjp(nondiff_argnames=("steps",))
        def square(x):
            return x**2


@pytest.mark.parametrize(
    "bwd, jvp, words",
    [
        (lambda r, ct: ct, None, "the bwd rule of fun must return a tuple of 2 cotangents"),
        (lambda r, ct: (ct,), None, "the bwd rule of fun must return a tuple of 2 cotangents"),
        (lambda r, ct: (ct, ct, ct), None, "the bwd rule of fun must return a tuple of 2"),
        (lambda r, ct: ([ct], ct), None, "the bwd rule of fun must return the structure"),
        (lambda r, ct: (ct[:1], ct), None, r"the bwd rule of fun must return float64\[3\]"),
        (lambda r, ct: (ct.astype("float32"), ct), None, r"return float64\[3\], got float32\[3\]"),
        (lambda r, ct: (ct, ct), lambda r, t: t, "the jvp rule of fun must return the structure"),
        (lambda r, ct: (ct, ct), lambda r, t: t[0][:1], r"the jvp rule .* return float64\[3\]"),
    ],
)
def test_results_of_rules_are_checked(bwd, jvp, words):
    @custom_vjp
    def fun(x, y):
        return x + y

    fun.defvjp(lambda x, y: (x + y, None), bwd)
    if jvp is not None:
        fun.defjvp(jvp)
    with pytest.raises(TypeError, match=words):
        jax.grad(lambda x: jnp.sum(fun(x, x)))(jnp.ones(3))


# Several devices


SHARDED = """
    import functools, itertools
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from osa_jax.autodiff import custom_vjp

    jax.config.update("jax_enable_x64", True)

    @custom_vjp
    def scale(x, alpha):
        return alpha * jnp.sin(x)

    def jvp(r, t):
        return r[1] * jnp.cos(r[0]) * t[0] + jnp.sin(r[0]) * t[1]

    def bwd(r, ct):
        return r[1] * jnp.cos(r[0]) * ct, jnp.sum(jnp.sin(r[0]) * ct)

    scale.defvjp(lambda x, alpha: (scale(x, alpha), (x, alpha)), bwd)
    scale.defjvp(jvp)

    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x, alpha = jnp.arange(8.0).reshape(8, 1) / 3, jnp.float64(1.5)
    direction = jnp.float64(1.0)
    split = jax.device_put(x, NamedSharding(mesh, P("d")))

    def loss(f, x, alpha):
        return jnp.sum(f(f(x, alpha), alpha) ** 2)

    def derivatives(loss, x, alpha):
        along = lambda x, a: jax.jvp(loss, (x, a), (x, direction))[1]
        both = jax.grad(loss, (0, 1))
        return [loss(x, alpha), *both(x, alpha), along(x, alpha), jax.jacfwd(loss, 1)(x, alpha),
                *jax.grad(along, (0, 1))(x, alpha), jax.jvp(both, (x, alpha), (x, direction))[1],
                jax.hessian(loss, 1)(x, alpha)]

    plain = jax.jit(functools.partial(derivatives, functools.partial(loss, scale.fun)))(x, alpha)

    def check(actual, wanted):
        for u, v in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(u, v, rtol=1e-12)

    # jit: the compiler splits the work.
    actual = jax.jit(functools.partial(derivatives, functools.partial(loss, scale)))(split, alpha)
    check(actual, plain)
    assert actual[1].sharding.spec == P("d"), actual[1].sharding

    # shard_map: the derivative of the whole, and derivatives taken on each device.
    for check_vma in (True, False):
        shard = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)

        @functools.partial(shard, in_specs=(P("d"), P()), out_specs=P())
        def mapped(x, alpha):
            return jax.lax.psum(loss(scale, x, alpha), "d")

        check(jax.jit(functools.partial(derivatives, mapped))(split, alpha), plain)

        @functools.partial(shard, in_specs=(P("d"), P()), out_specs=(P("d"), P()))
        def inside(x, alpha):
            x_bar, alpha_bar = jax.grad(functools.partial(loss, scale), (0, 1))(x, alpha)
            return x_bar, alpha_bar if check_vma else jax.lax.psum(alpha_bar, "d")

        check(jax.jit(inside)(split, alpha), plain[1:3])
        check(inside(split, alpha), plain[1:3])

        @functools.partial(shard, in_specs=(P("d"), P()), out_specs=P("d"))
        def per_sample(x, alpha):
            return jax.vmap(jax.grad(functools.partial(loss, scale)), (0, None))(x, alpha)

        check(jax.jit(per_sample)(split, alpha), plain[1])

        @functools.partial(shard, in_specs=(P("d"), P()), out_specs=P())
        def looped(x, alpha):
            out, _ = jax.lax.scan(lambda x, _: (scale(x, alpha), None), x, length=2)
            return jax.lax.psum(jnp.sum(out**2), "d")

        for mode in (jax.grad, jax.jacfwd):
            check(jax.jit(mode(looped, 1))(split, alpha), plain[2])
    print("done")
"""


def test_sharded_over_four_devices():
    result = run_python(SHARDED, devices=4)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout == "done\n"
