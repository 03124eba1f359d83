"""What the operator's programs hold and communicate, and that samples and heads do not meet in them."""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from osa_jax import orthogonal_attention
from tests.helpers import orthogonality_tolerance, relative_error, run_python
from tests.reference import METHODS, TOLERANCE, attend

RNG = np.random.default_rng(12)
BATCH = [RNG.standard_normal((3, 7, 2, width)) for width in (3, 3, 2)]
BATCH += [np.array([0.3, -0.2]), RNG.standard_normal((3, 7, 2, 2))]

each_method = pytest.mark.parametrize("method", METHODS)


@functools.cache
def pull(method):
    """The value, and the cotangents of query, key, value and alpha."""

    @jax.jit
    def run(q, k, v, alpha, y_bar):
        y, back = jax.vjp(lambda *args: attend(method)(*args[:3], alpha=args[3]), q, k, v, alpha)
        return y, *back(y_bar)

    return run


@each_method
@pytest.mark.parametrize("kind", ["nan", "inf", "zero", "large"])
def test_a_bad_head_of_one_sample_stays_there(method, kind):
    """Bit for bit; `large` needs more doublings than the others."""
    factor = {"nan": np.nan, "inf": np.inf, "zero": 0.0, "large": 30.0}[kind]
    batch = [x.copy() for x in BATCH]
    for x in batch[:3]:
        x[1, :, 0] *= factor
    *before, alpha_before = pull(method)(*BATCH)
    *after, alpha_after = pull(method)(*batch)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one[::2], other[::2])
        np.testing.assert_array_equal(one[1, :, 1], other[1, :, 1])
        assert np.isfinite(other).all() or kind in ("nan", "inf")
    assert alpha_before[1] == alpha_after[1]
    if kind == "zero":
        for x_bar, true in zip(after[1:], (0, 0, BATCH[4][1, :, 0]), strict=True):
            np.testing.assert_array_equal(x_bar[1, :, 0] - true, 0)


@each_method
@pytest.mark.parametrize("eager", [False, True])
def test_debug_nans_is_silent_on_finite_input(method, eager):
    """Also op by op, which sees what the branches not taken compute; and both give the same."""
    batch = [x.copy() for x in BATCH]
    batch[0][1], batch[1][2] = 0, batch[0][2]
    expected = pull(method)(*batch)
    with jax.debug_nans(True), jax.disable_jit(eager):
        got = pull(method)(*batch)
    for one, other in zip(got, expected, strict=True):
        assert relative_error(one, other) <= TOLERANCE


# What the jaxprs hold


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


TOKENS = 37


def programs(method):
    """The equations of value, gradient and Hessian-vector product."""
    q, k, v = (jnp.zeros((TOKENS, 2, width), jnp.float32) for width in (3, 3, 2))
    arguments = (q, k, v, jnp.ones(2, jnp.float32))

    def f(*args):
        return jnp.sum(attend(method)(*args[:3], alpha=args[3]) ** 2)

    gradient = jax.grad(f, (0, 1, 2, 3))
    for program in (f, gradient, lambda *args: jax.jvp(gradient, args, args)[1]):
        yield list(equations(jax.make_jaxpr(program)(*arguments).jaxpr))


@each_method
def test_no_array_has_two_token_axes(method):
    for found in programs(method):
        shapes = [v.aval.shape for e in found for v in (*e.invars, *e.outvars)]
        assert any(shape.count(TOKENS) == 1 for shape in shapes)
        assert any(shape.count(TOKENS) > 1 for shape in shapes) == (method == "dense")


@each_method
def test_every_product_asks_for_the_highest_precision(method):
    with jax.default_matmul_precision("bfloat16"):
        for found in programs(method):
            products = [e for e in found if e.primitive.name == "dot_general"]
            assert len(products) > 5
            for equation in products:
                assert set(equation.params["precision"]) == {lax.Precision.HIGHEST}


def test_global_precision_changes_nothing():
    q, k = (x.astype(np.float32)[0] for x in BATCH[:2])
    eye = np.tile(np.eye(7, dtype=np.float32)[:, None], (1, 2, 1))
    expected = orthogonal_attention(q, k, eye, alpha=0.3)
    with jax.default_matmul_precision("bfloat16"):
        got = np.asarray(orthogonal_attention(q, k, eye, alpha=0.3))
    np.testing.assert_array_equal(got, expected)
    defect = np.einsum("nhi,nhj->hij", got, got) - np.eye(7)
    assert np.abs(defect).max() <= orthogonality_tolerance(np.float32, 1.0)


# Several devices


SHARDED = """
    import functools
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from osa_jax import orthogonal_attention

    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    q, k, v, weights = (rng.standard_normal((4, 8, 4, width)) for width in (3, 3, 2, 2))
    alpha = np.array([0.1, -0.2, 0.3, 0.4])
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def loss(q, k, v, alpha, weights):
        y = orthogonal_attention(q, k, v, alpha=alpha)
        return jnp.sum(weights * y), y

    def pull(*args):
        gradients, y = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(*args)
        return y, *gradients

    def check(got, wanted):
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-13 * np.abs(other).max())

    single = jax.jit(pull)(q, k, v, alpha, weights)

    # jit: the compiler splits the work, by batch, tokens or heads. Of tokens it reduces only.
    for axis, by_head in ((0, P()), (1, P()), (2, P("d"))):
        split = NamedSharding(mesh, P(*[None] * axis, "d"))
        shardings = (split, split, split, NamedSharding(mesh, by_head), split)
        compiled = jax.jit(pull, in_shardings=shardings).lower(q, k, v, alpha, weights).compile()
        got = compiled(*(jax.device_put(*pair) for pair in zip((q, k, v, alpha, weights), shardings)))
        check(got, single)
        for x in got[:4]:
            assert x.sharding.is_equivalent_to(split, 4), (axis, x.sharding)
        assert "all-gather" not in compiled.as_text(), axis

    # shard_map: alpha is replicated, so its gradient is a sum over devices.
    arrays = (P("d"), P("d"), P("d"), P(), P("d"))
    for check_vma in (True, False):
        shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=arrays, check_vma=check_vma)

        def inside(*args):
            y, *bars, alpha_bar = pull(*args)
            return y, *bars, alpha_bar if check_vma else jax.lax.psum(alpha_bar, "d")

        def summed(*args):
            return jax.lax.psum(loss(*args)[0], "d")

        @jax.jit
        def both(*args):
            on_devices = shard(inside, out_specs=(P("d"),) * 4 + (P(),))(*args)
            return on_devices, jax.grad(shard(summed, out_specs=P()), (0, 1, 2, 3))(*args)

        on_devices, of_the_whole = both(q, k, v, alpha, weights)
        check(on_devices, single)
        check(of_the_whole, single[1:])
    print("done")
"""


def test_sharded_over_four_devices():
    result = run_python(SHARDED, devices=4)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout == "done\n"
