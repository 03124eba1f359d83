"""Spectral conditioning against numpy's SVD in float64, on every kind of tree and kernel, and its wrappers."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from osa_jax import spectral_condition, vanished_gradients
from osa_jax.nn import OrthogonalSelfAttention, SpectralConditioned
from osa_jax.nn.linen import SpectralConditioned as LinenSpectralConditioned
from tests.helpers import relative_error
from tests.test_polar import EPS, exact, hard_matrices

METHODS = pytest.mark.parametrize("method", ["identity", "svd", "polar"])
RNG = np.random.default_rng(3)
F, H, D = 10, 2, 4
KERNEL = RNG.normal(size=(F, H, D)).astype(np.float32)
NAMES = ("query", "key", "value")
X = jnp.asarray(RNG.normal(size=(3, 5, F)), jnp.float32)


def corrected(w, method, lam=1.0):
    """`W + C` of one matrix, in float64."""
    w = np.asarray(w, np.float64)
    return w + lam * (np.eye(*w.shape) if method == "identity" else exact(w)[0])


def corrected_heads(kernel, method, lam=1.0):
    """The same for each head of `[F, H, D]`."""
    return np.stack([corrected(head, method, lam) for head in np.moveaxis(kernel, 1, 0)], axis=1)


def close(got, expected):
    assert got.shape == expected.shape and relative_error(got, expected) < 1e-5


@pytest.mark.parametrize("shape", [(96, 24), (24, 24), (5, 17)], ids=str)
def test_condition_numbers_are_at_most_two_and_the_two_methods_agree(shape):
    matrices = hard_matrices(*shape)
    params = {"query": {"kernel": jnp.asarray(matrices.swapaxes(0, 1))}}  # [F, H, D]: each head a case.
    by = {method: spectral_condition(params, method=method)["query"]["kernel"] for method in ("svd", "polar")}
    for head, w in enumerate(matrices):
        svd, polar = (np.asarray(by[method][:, head], np.float64) for method in by)
        condition = exact(w)[1]
        assert max(np.linalg.cond(svd), np.linalg.cond(polar)) <= 2
        assert relative_error(polar - w, svd - w) <= max(1e-5, 20 * EPS * condition)
        assert relative_error(svd - w, exact(w)[0]) <= max(1e-5, 20 * EPS * condition)


@METHODS
def test_the_two_readings_of_the_identity(method):
    flat = KERNEL.reshape(F, H * D)
    for kernel, heads in ((KERNEL, None), (KERNEL, H), (flat, H)):
        by_head = spectral_condition({"query/kernel": kernel}, method=method, lam=3.0, heads=heads)
        close(by_head["query/kernel"], corrected_heads(KERNEL, method, 3.0).reshape(kernel.shape))
        fused = spectral_condition({"query/kernel": kernel}, method=method, lam=3.0, heads=heads, layout="fused")
        close(fused["query/kernel"], corrected(flat, method, 3.0).reshape(kernel.shape))


@METHODS
def test_a_fused_kernel_holds_query_key_and_value(method):
    parts = RNG.normal(size=(3, F, H, D)).astype(np.float32)
    lam = {"query": 1.0, "value": 2.0}
    each = [corrected_heads(part, method, lam.get(name, 0)) for part, name in zip(parts, NAMES, strict=True)]
    stacked, expected = np.stack(parts, axis=1), np.stack(each, axis=1)
    got = spectral_condition({"qkv": {"kernel": stacked}}, method=method, lam=lam)
    close(got["qkv"]["kernel"], expected)
    flat = {"qkv": {"kernel": stacked.reshape(F, -1)}}
    close(spectral_condition(flat, method=method, lam=lam, heads=H)["qkv"]["kernel"], expected.reshape(F, -1))
    whole = spectral_condition(flat, method=method, layout="fused", select={"qkv": "qkv/kernel"})["qkv"]["kernel"]
    for got, part in zip(np.split(whole, 3, axis=1), parts, strict=True):
        close(got, corrected(part.reshape(F, -1), method))


@METHODS
def test_layers_stacked_in_front_are_corrected_one_by_one(method):
    layers = RNG.normal(size=(2, F, H, D)).astype(np.float32)
    expected = np.stack([corrected_heads(layer, method) for layer in layers])
    close(spectral_condition({"key/kernel": layers}, method=method)["key/kernel"], expected)
    condition = partial(spectral_condition, method=method)
    close(jax.jit(jax.vmap(condition))({"key/kernel": layers})["key/kernel"], expected)
    three = np.stack([layers] * 3, axis=2)
    got = spectral_condition({"qkv/kernel": three}, method=method)["qkv/kernel"]
    close(got, np.stack([expected] * 3, axis=2))


class Pair(NamedTuple):
    kernel: jax.Array
    bias: jax.Array


def test_every_tree_is_searched_by_its_paths_and_the_rest_stays():
    bias, other = jnp.zeros((H, D)), jnp.ones((F, H, D))
    tree = {"layers": [({"query": Pair(jnp.asarray(KERNEL), bias)}, other)]}
    for select in (None, "query", "0/0/query", {"query": "layers/./0/query"}):
        got = spectral_condition(tree, lam=2.0, select=select)
        assert jax.tree.structure(got) == jax.tree.structure(tree)
        query = got["layers"][0][0]["query"]
        close(query.kernel, corrected_heads(KERNEL, "identity", 2.0))
        assert query.bias is bias and got["layers"][0][1] is other
    assert spectral_condition(tree, lam=0.0)["layers"][0][0]["query"].kernel is tree["layers"][0][0]["query"].kernel


def test_projections_have_factors_and_patterns_of_their_own():
    tree = {name: {"kernel": jnp.asarray(KERNEL)} for name in ("wq", "wk", "value")}
    got = spectral_condition(tree, lam={"q": 1.0, "v": 2.0}, select={"q": "wq", "k": "wk", "v": "^value/kernel$"})
    for name, lam in (("wq", 1.0), ("wk", 0.0), ("value", 2.0)):
        close(got[name]["kernel"], corrected_heads(KERNEL, "identity", lam))


@METHODS
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_the_dtype_stays_and_the_sum_is_rounded_once(method, dtype):
    kernel = jnp.asarray(KERNEL, dtype)
    got = spectral_condition({"query/kernel": kernel}, method=method)["query/kernel"]
    expected = corrected_heads(np.asarray(kernel, np.float64), method)
    assert got.dtype == dtype
    assert relative_error(got, expected) < (1e-5 if dtype == jnp.float64 else float(jnp.finfo(dtype).eps) / 2)


ORTHOGONAL = np.linalg.qr(RNG.normal(size=(F, D)))[0]
LOW_RANK = KERNEL[:, 0, :1] * KERNEL[:1, 0]


@METHODS
@pytest.mark.parametrize("matrix", [KERNEL[:, 0], ORTHOGONAL, 0 * ORTHOGONAL, LOW_RANK], ids=["", "orth", "0", "low"])
def test_c_is_a_constant_for_every_derivative(method, matrix):
    w = jnp.asarray(matrix, jnp.float32)[:, None]
    c = spectral_condition({"value/kernel": w}, method=method)["value/kernel"] - w

    def loss(w, correct):
        kernel = spectral_condition({"value/kernel": w}, method=method)["value/kernel"] if correct else w + c
        return jnp.sum(jnp.sin(kernel) * KERNEL[:, :1])

    gradient, expected = (jax.grad(loss)(w, correct) for correct in (True, False))
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(gradient, expected, atol=1e-5)
    tangent = jax.jvp(partial(loss, correct=True), (w,), (w + 1,))[1]
    np.testing.assert_allclose(tangent, jnp.vdot(gradient, w + 1), rtol=1e-4)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(partial(loss, correct=True)))(w), expected, atol=1e-5)


BAD = {
    "method must be one of .* got 'svg'": {"method": "svg"},
    "layout must be one of .* got 'heads'": {"layout": "heads"},
    "heads must be a positive integer": {"heads": 0},
    "lam must be finite and not negative, got -1": {"lam": -1.0},
    "lam must be finite and not negative, got nan": {"lam": float("nan")},
    r"lam\['value'\] must be finite and not negative, got inf": {"lam": {"value": float("inf")}},
    "lam must be finite and not negative, got '1'": {"lam": "1"},
    r"lam\['queri'\] is of no projection; select has \['key', 'query', 'value'\]": {"lam": {"queri": 1.0}},
    "select matches nothing with 'wq'; the paths are .*'query/kernel'": {"select": "wq"},
    "select matches nothing with 'wv'": {"select": {"query": "query", "value": "wv"}},
    "select must match each path once, got .*'a', 'b'.* for 'query/kernel'": {"select": {"a": "query", "b": "kernel"}},
    "select must hold regular expressions": {"select": "("},
    r"'query/kernel' of shape \(10, 2, 4\) cannot be split into heads=3": {"heads": 3},
    "'scale' must be .F, H, D. or .F, H . D., got .4,.; narrow select": {"select": "scale"},
    "'count' must be real floating, got int": {"select": "count"},
    "'flat' of shape .* cannot be split into heads=None": {"select": "flat"},
    "'query/kernel' must be .F, 3, H, D. or": {"select": {"qkv": "query"}},
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_the_argument_and_the_remedy(message):
    tree = {"query": {"kernel": KERNEL}, "scale": np.ones(4), "count": np.ones((4, 4), int), "flat": np.ones((4, 6))}
    with pytest.raises(ValueError, match=message):
        spectral_condition(tree, **BAD[message])


def test_a_tree_without_such_kernels_is_an_error_that_lists_the_paths():
    with pytest.raises(ValueError, match="select matches nothing.*'qkv/kernel'; the paths are .'a/b'. of 1"):
        spectral_condition({"a": {"b": KERNEL}})


def attention(**options):
    return nnx.MultiHeadAttention(H, F, qkv_features=H * D, decode=False, rngs=nnx.Rngs(0), **options)


def test_nothing_is_corrected_twice():
    plain = {"query": {"kernel": jnp.asarray(KERNEL)}}
    twice = [
        lambda: spectral_condition(spectral_condition(plain)),
        lambda: jax.jit(lambda tree: spectral_condition(spectral_condition(tree)))(plain),
        lambda: spectral_condition(nnx.state(SpectralConditioned(attention()), nnx.Param)),
        lambda: SpectralConditioned(SpectralConditioned(attention())),
        lambda: SpectralConditioned(nnx.List([SpectralConditioned(attention())])),
        lambda: linen_conditioned(linen_conditioned(LINEN)).init(jax.random.key(0), X),
        lambda: spectral_condition(linen_conditioned(LINEN).init(jax.random.key(0), X)),
    ]
    for call in twice:
        with pytest.raises(ValueError, match="corrected already at '.*kernel': correct each kernel once"):
            call()
    spectral_condition(plain)  # What went in is as it was.


OPTIONS = {"method": "polar", "lam": {"query": 1.0, "key": 1.0, "value": 2.0}}


def corrected_by_numpy(params):
    """The parameters of an attention layer, corrected as OPTIONS say."""
    kernels = {
        name: params[name] | {"kernel": jnp.asarray(corrected_heads(params[name]["kernel"], "svd", lam), jnp.float32)}
        for name, lam in OPTIONS["lam"].items()
    }
    return params | kernels


@pytest.mark.parametrize(
    "make",
    [attention, lambda: OrthogonalSelfAttention(H, F, qkv_features=H * D, rngs=nnx.Rngs(0))],
    ids=["flax", "osa"],
)
def test_an_nnx_module_runs_with_w_plus_c_and_keeps_w(make):
    layer, twin = make(), make()
    before = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    nnx.update(twin, corrected_by_numpy(before))
    conditioned = SpectralConditioned(layer, **OPTIONS)
    expected, wanted = nnx.jit(nnx.value_and_grad(lambda module, x: jnp.sum(module(x) ** 3)))(twin, X)
    value, gradient = nnx.jit(nnx.value_and_grad(lambda module, x: jnp.sum(module(x) ** 3)))(conditioned, X)
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    gradient = nnx.to_pure_dict(gradient)["spectrally_conditioned"]
    kernels = gradient["query"]["kernel"], nnx.to_pure_dict(wanted)["query"]["kernel"]
    assert relative_error(*kernels) < 1e-4
    after = nnx.to_pure_dict(nnx.state(conditioned, nnx.Param))["spectrally_conditioned"]
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_a_saved_and_loaded_nnx_module_is_corrected_once():
    saved = SpectralConditioned(attention(), **OPTIONS)
    loaded = SpectralConditioned(nnx.clone(attention()), **OPTIONS)
    values = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(saved)))
    nnx.update(loaded, jax.tree.map(lambda leaf: jnp.asarray(2 * leaf), values))
    assert np.abs(loaded(X) - saved(X)).max() > 0.1
    nnx.update(loaded, jax.tree.map(jnp.asarray, values))
    np.testing.assert_array_equal(loaded(X), saved(X))


def test_the_module_s_other_state_changes_as_ever():
    layer = attention(dropout_rate=0.5)
    conditioned = SpectralConditioned(layer)
    counts = [int(jax.tree.leaves(nnx.state(layer, nnx.RngCount))[0])]
    for _ in range(2):
        nnx.jit(lambda module, x: module(x, deterministic=False))(conditioned, X)
        counts.append(int(jax.tree.leaves(nnx.state(layer, nnx.RngCount))[0]))
    assert counts == [0, 1, 2]
    with pytest.raises(ValueError, match="select matches nothing with 'wq'"):
        SpectralConditioned(layer, select="wq")


LINEN = linen.MultiHeadDotProductAttention(H, qkv_features=H * D)
linen_conditioned = partial(LinenSpectralConditioned, **OPTIONS)


def test_a_linen_module_runs_with_w_plus_c_and_keeps_w():
    layer = LinenSpectralConditioned(LINEN, lam=100.0)
    variables = layer.init(jax.random.key(0), X)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(variables)) < 10  # Drawn and stored: W alone.
    layer = linen_conditioned(LINEN)
    inner = variables["params"]["spectrally_conditioned"]
    twin = corrected_by_numpy(inner)

    def loss(module, params):
        out, changed = module.apply({"params": params}, X, mutable=True)
        return jnp.sum(out**3), changed["params"]

    (value, stored), gradient = jax.jit(jax.value_and_grad(partial(loss, layer), has_aux=True))(variables["params"])
    (expected, _), wanted = jax.jit(jax.value_and_grad(partial(loss, LINEN), has_aux=True))(twin)
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    kernels = gradient["spectrally_conditioned"]["query"]["kernel"], wanted["query"]["kernel"]
    assert relative_error(*kernels) < 1e-4
    jax.tree.map(np.testing.assert_array_equal, stored, variables["params"])


@pytest.mark.parametrize("layout", ["head", "fused"])
def test_the_identity_without_weight_decay_is_an_initialisation(layout):
    """Training W + lambda I from W_0 and training W from W_0 + lambda I give the same W + lambda I."""
    correct = partial(spectral_condition, lam=0.5, layout=layout)
    graph, start = nnx.split(attention(use_bias=False), nnx.Param)
    optimizer = optax.adam(0.01)

    def trained(params, use):
        def loss(params):
            return jnp.mean((nnx.merge(graph, use(params))(X) - jnp.cos(X)) ** 2)

        state = optimizer.init(params)
        for _ in range(4):
            updates, state = optimizer.update(jax.grad(loss)(params), state)
            params = optax.apply_updates(params, updates)
        return use(params)

    added = jax.jit(lambda params: trained(params, correct))(start)
    started = jax.jit(lambda params: trained(correct(params), lambda params: params))(start)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), started, correct(start))
    assert max(jax.tree.leaves(moved)) > 0.03
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), added, started)


@pytest.mark.parametrize("lam, vanished", [(1.0, set()), (10.0, {"query", "key"})])
def test_vanished_gradients_tell_a_saturated_softmax(lam, vanished):
    """Normalised tokens of width 64 in four heads, the paper's lambda = 10: the gradients are zero."""
    tokens = jnp.asarray(np.sign(RNG.normal(size=(4, 16, 64))), jnp.float32)
    layer = SpectralConditioned(nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0)), lam=lam)
    gradient = nnx.jit(nnx.grad(lambda module: jnp.sum(module(tokens) ** 2)))(layer)
    got = {name for name, value in vanished_gradients(gradient).items() if value}
    assert got == {f"spectrally_conditioned/{name}/kernel" for name in vanished}
    kernel = nnx.to_pure_dict(gradient)["spectrally_conditioned"]["query"]["kernel"]
    assert (np.abs(kernel).max() < 1e-20) == bool(vanished)


def test_vanished_gradients_are_relative_and_by_projection():
    qkv = jnp.ones((F, 3, H, D)).at[:, 1].set(1e-9)
    gradient = {"qkv": {"kernel": qkv}, "flat/qkv/kernel": qkv.reshape(F, -1), "out": jnp.full(3, 1e9)}
    names = [f"{path}[{name}]" for path in ("flat/qkv/kernel", "qkv/kernel") for name in ("query", "key", "value")]
    for scale in (1, 1e-20):
        got = vanished_gradients(jax.tree.map(lambda leaf, scale=scale: leaf * scale, gradient))
        assert {name: bool(value) for name, value in got.items()} == {name: "key" in name for name in names}
    assert not any(vanished_gradients({"query/kernel": jnp.zeros((F, H, D))}).values())
    assert vanished_gradients({"out": jnp.zeros(3)}) == {}
    with pytest.raises(ValueError, match="select matches nothing with 'wq'"):
        vanished_gradients(gradient, select="wq")
