"""The NNX and the Linen layer against numpy, each other, and Flax's conventions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import ScopeParamShapeError

from osa_jax.initializers import stiefel
from osa_jax.nn import OrthogonalSelfAttention
from osa_jax.nn.linen import OrthogonalSelfAttention as LinenOrthogonalSelfAttention
from tests.helpers import run_python

HEADS, FEATURES, VALUES, QUERIES, OUT = 2, 12, 10, 4, 7
WIDTHS = {"qkv_features": VALUES, "out_features": OUT, "qk_features": QUERIES}
OPTIONS = WIDTHS | {"param_dtype": jnp.float64, "use_bias": True, "alpha": 0.7}
RNG = np.random.default_rng(5)
X = RNG.normal(size=(3, 2, 6, FEATURES))
X64 = jnp.asarray(X)


def layer_nnx(**options):
    return OrthogonalSelfAttention(HEADS, FEATURES, rngs=nnx.Rngs(1), **(OPTIONS | options))


def layer_linen(**options):
    return LinenOrthogonalSelfAttention(HEADS, **(OPTIONS | options))


def randomise(params):
    """The same tree of parameters with random values, so that no bias is zero and heads differ."""
    return jax.tree.map(lambda p: jnp.asarray(RNG.normal(size=p.shape) * 0.5, p.dtype), params)


PARAMS = randomise(nnx.to_pure_dict(nnx.state(layer_nnx(), nnx.Param)))


def apply_nnx(params, x, **call):
    layer = layer_nnx()
    nnx.update(layer, params)
    return layer(x, **call)


def apply_linen(params, x, **call):
    return layer_linen().apply({"params": params}, x, **call)


def numpy_attention(params, x):
    """Section 2 of the paper by eigen-decomposition, tokens [..., N, F] one sample at a time."""
    p = jax.tree.map(np.asarray, params)
    out = np.zeros((*x.shape[:-1], p["out"]["kernel"].shape[-1])) + p["out"]["bias"]
    for index in np.ndindex(x.shape[:-2]):
        for head in range(HEADS):
            q, k, v = (
                x[index] @ p[name]["kernel"][:, head] + p[name]["bias"][head] for name in ("query", "key", "value")
            )
            skew = p["alpha"][head] / np.sqrt(q.shape[-1]) * (q @ k.T - k @ q.T)
            phases, vectors = np.linalg.eigh(1j * skew)
            attention = (vectors * np.exp(-1j * phases) @ vectors.conj().T).real
            out[index] += attention @ v @ p["out"]["kernel"][head]
    return out


EXPECTED = numpy_attention(PARAMS, X)
BOTH = pytest.mark.parametrize("apply", [apply_nnx, apply_linen], ids=["nnx", "linen"])


def close(actual, expected, scale=1.0):
    expected = np.asarray(expected)
    atol = scale * 1e-12 * max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=atol)


@BOTH
def test_equals_the_paper_in_numpy(apply):
    close(apply(PARAMS, X64), EXPECTED)
    close(apply(PARAMS, X64[0, 0]), EXPECTED[0, 0])


def test_parameters_follow_flax():
    flax = nnx.MultiHeadAttention(HEADS, FEATURES, VALUES, OUT, decode=False, rngs=nnx.Rngs(0))
    ours = OrthogonalSelfAttention(HEADS, FEATURES, VALUES, OUT, use_bias=True, alpha=0.3, rngs=nnx.Rngs(0))
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(ours, nnx.Param)))
    np.testing.assert_array_equal(ours.alpha[...], np.full(HEADS, 0.3, np.float32))
    assert shapes.pop("alpha") == (HEADS,)
    assert shapes == jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(flax, nnx.Param)))
    linen = jax.eval_shape(layer_linen().init, jax.random.key(0), X64)["params"]
    assert jax.tree.map(lambda p: (p.shape, p.dtype), linen) == jax.tree.map(lambda p: (p.shape, p.dtype), PARAMS)


def test_heads_may_share_one_scale():
    alpha = np.float64(0.3)
    expected = numpy_attention(PARAMS | {"alpha": np.full(HEADS, alpha)}, X)
    layer = layer_nnx(share_alpha=True)
    assert layer.alpha.shape == ()
    nnx.update(layer, PARAMS | {"alpha": alpha})
    close(layer(X64), expected)
    linen = layer_linen(share_alpha=True)
    assert jax.eval_shape(linen.init, jax.random.key(0), X64)["params"]["alpha"].shape == ()
    close(linen.apply({"params": PARAMS | {"alpha": alpha}}, X64), expected)


@pytest.mark.parametrize("method", ["exact", "qr", "newton_schulz", "dense", "auto"])
def test_both_layers_give_the_same_numbers_for_every_method(method):
    options = {"method": method}
    if method == "newton_schulz":
        options |= {"num_iters": 12, "coefficients": "cubic"}
    layer = layer_nnx(**options)
    nnx.update(layer, PARAMS)
    ours = layer(X64[0])
    np.testing.assert_array_equal(np.asarray(ours), layer_linen(**options).apply({"params": PARAMS}, X64[0]))
    close(ours, EXPECTED[0], scale=1e4 if method == "newton_schulz" else 1.0)


def kernels_of(head_init, heads=2, features=8, qk_features=None):
    """The four kernels of both layers, in float64 numpy."""
    options = {"head_init": head_init, "qk_features": qk_features, "param_dtype": jnp.float64}
    layer = OrthogonalSelfAttention(heads, features, rngs=nnx.Rngs(3), **options)
    yield nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    linen = LinenOrthogonalSelfAttention(heads, **options)
    yield jax.jit(linen.init)(jax.random.key(3), jnp.ones((5, features)))["params"]


@pytest.mark.parametrize("head_init", ["joint", "independent"])
def test_the_layers_start_as_the_paper_says(head_init):
    for params in kernels_of(head_init, qk_features=6):
        query, key, value, out = (np.asarray(params[name]["kernel"]) for name in ("query", "key", "value", "out"))
        assert set(params["query"]) == {"kernel"}
        skew = np.einsum("fhd,ghd->hfg", query, key) - np.einsum("fhd,ghd->hfg", key, query)
        expected = np.tile([1.0] * 6 + [0.0] * 2, (2, 1))
        close(np.linalg.svd(skew, compute_uv=False), expected)
        close(np.einsum("fhd,fhe->hde", value, value), np.tile(np.eye(4), (2, 1, 1)))
        close(np.einsum("hdf,hef->hde", out, out), np.tile(np.eye(4), (2, 1, 1)))
        spectrum = np.linalg.svd(np.einsum("fhd,hdg->fg", value, out), compute_uv=False)
        if head_init == "joint":
            close(spectrum, np.ones(8))
        else:
            assert spectrum[0] > 1.2 * spectrum[-1]


def test_linen_layers_of_one_model_start_apart():
    keys = jax.random.split(jax.random.key(0))
    draws = [layer_linen().init(key, X64)["params"]["query"]["kernel"] for key in keys]
    assert np.abs(draws[0] - draws[1]).max() > 0.1
    stacked = layer_linen().init(keys[0], X64)["params"]
    assert np.abs(stacked["query"]["kernel"] - stacked["key"]["kernel"]).max() > 0.1


def test_another_kernel_init_replaces_the_paper_s_and_lifts_its_limit():
    layer = OrthogonalSelfAttention(1, 8, kernel_init=stiefel(), rngs=nnx.Rngs(0))
    close(jnp.einsum("fhd,fhe->de", *[layer.query.kernel[...]] * 2), np.eye(8), scale=1e7)


@BOTH
def test_padding_is_as_if_it_were_not_there(apply):
    """Value and gradients equal those of the valid tokens alone, whatever the padding holds."""
    valid = np.array([True, True, False, True, False, True])
    garbage = np.array([0.0, 0.0, np.nan, 0.0, np.inf, 0.0])[:, None]
    padded, packed = jnp.asarray(np.where(valid[:, None], X[0], garbage)), X64[0][:, valid]
    mask = jnp.tile(jnp.asarray(valid), (2, 1))
    weights = RNG.normal(size=EXPECTED[0].shape)

    def loss(params, x, weights, **call):
        out = apply(params, x, **call)
        return jnp.vdot(jnp.asarray(weights), out), out

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, out), grads = run(PARAMS, padded, weights, mask=mask)
    (_, expected), wanted = run(PARAMS, packed, weights[:, valid])
    close(out[:, valid], expected)
    np.testing.assert_array_equal(out[:, ~valid], np.broadcast_to(PARAMS["out"]["bias"], (2, 2, OUT)))
    close(grads[1][:, valid], wanted[1])
    np.testing.assert_array_equal(np.asarray(grads[1][:, ~valid]), 0)
    # The bias of the output is the one parameter that sees a padding token.
    wanted[0]["out"]["bias"] += weights[:, ~valid].sum((0, 1))
    jax.tree.map(close, grads[0], wanted[0])


@BOTH
def test_forward_and_reverse_mode_agree_under_every_transformation(apply):
    x = X64[0, 0]
    cotangent = jnp.asarray(RNG.normal(size=(6, OUT)))

    def f(params, x):
        return jnp.vdot(cotangent, apply(params, x))

    direction = jnp.asarray(RNG.normal(size=x.shape))

    def along(t):
        return f(PARAMS, x + t * direction)

    def scanned(params, x):
        steps = jnp.array([1.0, 0.0])
        return jax.lax.scan(lambda c, s: (c + s * f(params, x * s), None), 0.0, steps)[0]

    def everything(params, x):
        by_both = (0, 1)
        return {
            "reverse": jax.jacrev(f, by_both)(params, x),
            "forward": jax.jacfwd(f, by_both)(params, x),
            "checkpoint": jax.grad(jax.checkpoint(f), by_both)(params, x),
            "scan": jax.grad(scanned, by_both)(params, x),
        }

    grads = jax.jit(everything)(PARAMS, x)
    for other in ("forward", "checkpoint", "scan"):
        jax.tree.map(lambda a, b: close(a, b, 10), grads[other], grads["reverse"])
    batched = jax.jit(jax.vmap(jax.grad(f, 1), (None, 0)))(PARAMS, X64[0])
    close(batched[0], grads["reverse"][1], 10)

    step, slope = 1e-5, jax.jit(jax.value_and_grad(along))
    (above, slope_above), (below, slope_below) = slope(step), slope(-step)
    close(jnp.vdot(direction, grads["reverse"][1]), (above - below) / (2 * step), 1e5)
    close(jax.jit(jax.hessian(along))(0.0), (slope_above - slope_below) / (2 * step), 1e5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_compute_dtype_and_cotangent_dtypes(dtype):
    options = OPTIONS | {"param_dtype": jnp.float32, "dtype": jnp.dtype(dtype)}
    layer = OrthogonalSelfAttention(HEADS, FEATURES, rngs=nnx.Rngs(1), **options)
    linen = LinenOrthogonalSelfAttention(HEADS, **options)
    params = jax.tree.map(lambda p: p.astype(jnp.float32), PARAMS)
    nnx.update(layer, params)
    x = X64[0].astype(jnp.float32)

    @jax.jit
    def run(params):
        out, pull = jax.vjp(lambda p: linen.apply({"params": p}, x), params)
        return out, pull(jnp.ones_like(out))[0]

    out, grads = run(params)
    assert out.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(nnx.jit(lambda m: m(x))(layer), np.float32))
    bound = 40 * float(jnp.finfo(dtype).eps) * np.abs(EXPECTED).max()
    np.testing.assert_allclose(np.asarray(out, np.float64), EXPECTED[0], rtol=0, atol=bound)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))


def test_low_precision_parameters_are_drawn_in_float32_and_rounded():
    layer = OrthogonalSelfAttention(2, 8, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    query = np.asarray(layer.query.kernel[...].astype(jnp.float32))
    gram = np.einsum("fhd,fhe->hde", query, query)
    np.testing.assert_allclose(gram, np.tile(np.eye(4), (2, 1, 1)), rtol=0, atol=8 * 2**-9)
    assert layer.alpha.dtype == jnp.bfloat16


def test_dropout_acts_on_the_output_alone():
    rate, x = 0.4, X64[0]
    layer = OrthogonalSelfAttention(HEADS, FEATURES, dropout_rate=rate, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    kept = np.asarray(layer(x, deterministic=True))
    dropped = np.asarray(layer(x, deterministic=False))
    zeros = dropped == 0
    np.testing.assert_allclose(dropped[~zeros], (kept / (1 - rate))[~zeros], rtol=1e-12)
    assert 0.2 < zeros.mean() < 0.6
    assert (zeros[0] != zeros[1]).any()
    assert (zeros != (np.asarray(layer(x, deterministic=False)) == 0)).any()
    layer.eval()
    np.testing.assert_array_equal(layer(x), kept)

    linen = LinenOrthogonalSelfAttention(HEADS, dropout_rate=rate, param_dtype=jnp.float64)
    variables = {"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}
    np.testing.assert_array_equal(linen.apply(variables, x, deterministic=True), kept)
    rngs = {"dropout": jax.random.key(1)}
    zeros = np.asarray(linen.apply(variables, x, deterministic=False, rngs=rngs)) == 0
    assert 0.2 < zeros.mean() < 0.6 and (zeros[0] != zeros[1]).any()


def test_precision_reaches_the_projections():
    layer = layer_nnx(precision=jax.lax.Precision.HIGHEST)
    graphdef, state = nnx.split(layer)
    jaxpr = str(jax.make_jaxpr(lambda s, x: nnx.merge(graphdef, s).query(x))(state, X64))
    assert "HIGHEST" in jaxpr


CONSTRUCTION = [
    ({"num_heads": 0}, "num_heads.*0"),
    ({"num_heads": -1}, "num_heads.*-1"),
    ({"num_heads": 5}, "qkv_features.*num_heads = 5.*12"),
    ({"qkv_features": 7}, "qkv_features.*num_heads = 2.*7"),
    ({"qk_features": 5}, "qk_features.*num_heads = 2.*5"),
    ({"num_heads": 1}, "qk_features = 12, num_heads = 1, in_features = 12.*qk_features <= 6"),
    ({"method": "magic"}, "method.*magic"),
    ({"dropout_rate": -0.1}, "dropout_rate.*-0.1"),
    ({"dropout_rate": 1.0}, "dropout_rate.*1.0"),
    ({"dropout_rate": float("nan")}, "dropout_rate.*nan"),
    ({"alpha": float("inf")}, "alpha.*inf"),
    ({"head_init": "tied"}, "head_init.*tied"),
]


@pytest.mark.parametrize("options, message", CONSTRUCTION)
def test_bad_options_are_named_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        OrthogonalSelfAttention(**({"num_heads": 2, "in_features": FEATURES, "rngs": nnx.Rngs(0)} | options))
    with pytest.raises(ValueError, match=message):
        layer = LinenOrthogonalSelfAttention(**({"num_heads": 2} | options))
        jax.eval_shape(layer.init, jax.random.key(0), X64)


@pytest.mark.parametrize("rngs, rate", [(None, 0.0), (nnx.Rngs(dropout=0), 0.0), (nnx.Rngs(params=0), 0.1)])
def test_missing_rngs_are_named_at_construction(rngs, rate):
    with pytest.raises(ValueError, match="rngs must hold a stream"):
        OrthogonalSelfAttention(2, FEATURES, dropout_rate=rate, rngs=rngs)


def test_missing_dropout_arguments_are_named_at_the_call():
    with pytest.raises(ValueError, match="deterministic"):
        layer_nnx(dropout_rate=0.1)(X64)
    linen = layer_linen(dropout_rate=0.1)
    with pytest.raises(ValueError, match="deterministic"):
        linen.apply({"params": PARAMS}, X64)
    with pytest.raises(ValueError, match="'dropout'.*0.1"):
        linen.apply({"params": PARAMS}, X64, deterministic=False)


CALLS = [
    (lambda f: f(X64, X64 + 1), "inputs_k.*self-attention"),
    (lambda f: f(X64, inputs_v=X64[:, :1]), "inputs_v.*self-attention"),
    (lambda f: f(X64, is_causal=True), "is_causal.*causal"),
    (lambda f: f(X64[0, 0, 0]), r"inputs_q.*N, .*\(12,\)"),
    (lambda f: f(jnp.ones((6, FEATURES), jnp.int32)), "floating.*int32"),
    (lambda f: f(X64, mask=jnp.ones((6, 6), bool)), r"mask.*\(6, 6\)"),
    (lambda f: f(X64, mask=jnp.ones((3, 2, 1, 6), bool)), r"mask.*\(3, 2, 1, 6\)"),
    (lambda f: f(X64, mask=jnp.ones((3, 2, 6))), "mask must be boolean.*float"),
]


@pytest.mark.parametrize("call, message", CALLS)
def test_bad_calls_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(layer_nnx())
    linen = layer_linen()
    with pytest.raises(ValueError, match=message):
        call(lambda *args, **kw: linen.apply({"params": PARAMS}, *args, **kw))


def test_another_number_of_features_is_named():
    with pytest.raises(ValueError, match=r"N, 12.*\(3, 2, 6, 5\)"):
        layer_nnx()(X64[..., :5])
    # The Linen layer learns its features from its input, so Flax compares the kernels' shapes.
    with pytest.raises(ScopeParamShapeError, match="12, 2, 2"):
        layer_linen().apply({"params": PARAMS}, X64[..., :5])


def test_the_same_array_three_times_is_self_attention():
    layer = layer_nnx()
    np.testing.assert_array_equal(layer(X64, X64, X64), layer(X64))


def test_checks_survive_python_o():
    code = (
        "from flax import nnx\nfrom osa_jax.nn import OrthogonalSelfAttention\n"
        "OrthogonalSelfAttention(5, 12, rngs=nnx.Rngs(0))\n"
    )
    run = run_python(code, "-O")
    assert "ValueError: qkv_features must be a positive multiple of num_heads = 5" in run.stderr
