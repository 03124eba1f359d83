"""The operator against float64 eigen-decomposition (experiments/oracle.py), Rodrigues' formula and complex steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from experiments import accuracy, oracle
from osa_jax import attention as attention_module
from osa_jax import orthogonal_attention, orthogonal_attention_weights
from tests.helpers import DTYPES, relative_error, run_python, value_tolerance

EXACT = ("exact", "qr", "dense")  # auto is one of them, see test_auto_picks_by_shape
METHODS = (*EXACT, "newton_schulz")


def draw(seed, *shape, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def inputs(seed, tokens=7, heads=2, width=3, value_width=3, dtype=np.float64):
    q, k = draw(seed, 2, tokens, heads, width, dtype=dtype)
    return q, k, draw(seed + 1, tokens, heads, value_width, dtype=dtype)


@functools.partial(jax.jit, static_argnames=("method", "num_iters", "coefficients"))
def pull(q, k, v, alpha, bar, *, mask=None, **options):
    """The value and the cotangents of query, key, value and alpha, in one program for all tests of a shape."""

    def attend(q, k, v, alpha):
        return orthogonal_attention(q, k, v, alpha=alpha, mask=mask, **options)

    y, back = jax.vjp(attend, q, k, v, alpha)
    return y, *back(bar)


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize(("tokens", "width"), [(9, 1), (3, 2), (16, 8), (37, 8)])
def test_value_gradient_orthogonality_on_every_family(method, tokens, width, dtype):
    """77 cases at once: every family at every nu. Random cotangents, all four gradients. The bounds are
    met with a factor to spare, which is asserted too."""
    for name, errors in accuracy.measure(method, tokens, width, dtype).items():
        worst = np.argmax(errors)
        assert errors[worst] <= 0.6, (name, oracle.cases(tokens, width).names[worst])


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize(("method", "tokens"), [("exact", 96), ("exact", 130), ("qr", 130)])
def test_width_64(method, tokens):
    for name, errors in accuracy.measure(method, tokens, 64, np.float32, (1.0, 1e4)).items():
        assert errors.max() <= 0.6, (name, errors.argmax())


@pytest.mark.optimized
@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rodrigues(method, dtype):
    """D = 1: A = I + sin(w)/w S + (1 - cos w)/w^2 S^2, w = c sqrt(|q|^2 |k|^2 - (q.k)^2)."""
    q, k, v = inputs(0, 6, 3, 1, dtype=dtype)
    alpha = np.array([0.3, -2.0, 40.0], dtype)
    got = orthogonal_attention(q, k, v, alpha=alpha, method=method)
    for h in range(3):
        x, y = np.float64(q[:, h, 0]), np.float64(k[:, h, 0])
        s = np.float64(alpha[h]) * (np.outer(x, y) - np.outer(y, x))
        w = abs(np.float64(alpha[h])) * np.sqrt((x @ x) * (y @ y) - (x @ y) ** 2)
        a = np.eye(6) + np.sin(w) / w * s + (1 - np.cos(w)) / w**2 * s @ s
        nu = abs(float(alpha[h])) * (x @ x + y @ y)
        assert relative_error(got[:, h], a @ v[:, h]) < value_tolerance(dtype, nu)


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("family", ["generic", "K = Q", "duplicate tokens", "dead column", "zero"])
def test_gradients_by_complex_steps(method, family):
    """Independent of the eigen-decomposition: Im f(x + ih)/h through SciPy's exponential."""
    rng = np.random.default_rng(3)
    q, k = oracle.query_key(rng, family, 6, 2)
    if family == "zero":
        q, k = np.zeros((2, 6, 2))
    v, bar = rng.standard_normal((2, 6, 2))
    args = (q, k, v, np.array(0.7))

    def f(q, k, v, alpha):
        s = alpha / np.sqrt(2) * (q @ k.T - k @ q.T)
        return np.sum(bar * (scipy.linalg.expm(s) @ v))

    _, *got = pull(*(x[:, None] for x in args[:3]), args[3], bar[:, None], method=method)
    for i, (x, gradient) in enumerate(zip(args, got, strict=True)):
        exact = np.zeros_like(x)
        for index in np.ndindex(x.shape):
            step = np.zeros(x.shape, complex)
            step[index] = 1e-30j
            exact[index] = f(*args[:i], x + step, *args[i + 1 :]).imag / 1e-30
        np.testing.assert_allclose(gradient.reshape(x.shape), exact, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_batches_heads_and_value_width(method):
    """Leading axes are handled natively and equal a loop; the value's width is its own."""
    q, k = draw(6, 2, 2, 3, 9, 2, 3)
    v, alpha = draw(7, 2, 3, 9, 2, 5), np.array([0.2, 0.5])
    got = orthogonal_attention(q, k, v, alpha=alpha, method=method)
    assert got.shape == v.shape
    for i in np.ndindex(2, 3):
        exact = oracle.attention(q[i], k[i], v[i], alpha)
        tolerance = 0.2 if method == "newton_schulz" else 1e-12
        assert relative_error(got[i], exact) < tolerance
        one = orthogonal_attention(q[i], k[i], v[i], alpha=alpha, method=method)
        np.testing.assert_allclose(got[i], one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 5, 2, 3), (3, 0, 2, 3), (3, 1, 2, 3)])
@pytest.mark.parametrize("method", METHODS)
def test_empty_batch_no_token_one_token(shape, method):
    q, k, v = draw(8, 3, *shape)
    value, q_bar, k_bar, v_bar, _ = pull(q, k, v, 1.0, v, method=method)
    np.testing.assert_allclose(value, v, atol=1e-14)  # S = 0
    np.testing.assert_allclose(v_bar, v, atol=1e-14)
    np.testing.assert_allclose([q_bar, k_bar], np.zeros((2, *shape)), atol=1e-14)


def test_newton_schulz_converges_to_exact():
    q, k, v = inputs(9, 12, 2, 3)
    exact = oracle.attention(q, k, v, np.full(2, 0.3))
    bar = draw(10, *v.shape)
    gradients = oracle.gradients(q, k, v, np.full(2, 0.3), bar)
    for steps, coefficients, tolerance in [(8, "cubic", 0.2), (20, "cubic", 1e-12), (8, "polar_express", 1e-9)]:
        options = {"method": "newton_schulz", "num_iters": steps, "coefficients": coefficients}
        value, *bars = pull(q, k, v, 0.3, bar, **options)
        assert relative_error(value, exact) < tolerance
        for got, true in zip(bars[:3], gradients[:3], strict=True):
            assert relative_error(got, true) < 10 * tolerance


def test_auto_picks_by_shape():
    def text(method, tokens):
        q, k, v = inputs(11, tokens)
        return str(jax.make_jaxpr(functools.partial(orthogonal_attention, method=method))(q, k, v))

    for tokens, choice in [(6, "dense"), (7, "exact")]:
        dots = [text(method, tokens).count("dot_general") for method in ("auto", "dense", "exact")]
        assert dots[0] == dots[("auto", "dense", "exact").index(choice)]
        assert dots[1] != dots[2]


@pytest.mark.optimized
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 30.0, 1000.0, 1e10, 1e30])
@pytest.mark.parametrize("method", EXACT)
def test_extreme_scales_stay_finite_and_orthogonal(scale, method):
    """Far beyond nu = 1/eps no digit of A is left, but it stays a rotation, and nothing overflows."""
    q, k, v = inputs(12, 50, 2, 16, 16, dtype=np.float32)
    q, k = q * np.float32(scale), k * np.float32(scale)
    value, *bars, _ = pull(q, k, v, np.float32(1), v, method=method)
    assert abs(np.linalg.norm(value) / np.linalg.norm(v) - 1) < 1e-4
    if scale < 1:
        np.testing.assert_allclose(value, v, atol=1e-6)
    assert all(np.isfinite(bar).all() for bar in bars[2:])
    if scale < 1e20:
        assert all(np.isfinite(bar).all() for bar in bars)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_mask(method, garbage):
    """Valid tokens get what they get alone, padding gets 0 and gives nothing, whatever it holds."""
    q, k, v = inputs(13, 12, 2, 2)
    mask = np.ones(12, bool)
    mask[[2, 5, 10, 11]] = False
    bar = draw(14, 12, 2, 3)
    alone, *bars_alone, alpha_bar_alone = pull(q[mask], k[mask], v[mask], 0.4, bar[mask], method=method)
    padded = [np.where(mask[:, None, None], x, garbage) for x in (q, k, v)]
    value, *bars, alpha_bar = pull(*padded, 0.4, bar, mask=mask, method=method)
    np.testing.assert_allclose(value[mask], alone, rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(value[~mask], 0)
    np.testing.assert_allclose(alpha_bar, alpha_bar_alone, rtol=1e-11)
    for got, true in zip(bars, bars_alone, strict=True):
        np.testing.assert_allclose(got[mask], true, rtol=1e-11, atol=1e-12)
        np.testing.assert_array_equal(got[~mask], 0)


def test_mask_by_sample_and_all_padding():
    q, k, v = draw(15, 3, 3, 6, 2, 2)
    mask = np.array([[True] * 6, [True] * 4 + [False] * 2, [False] * 6])
    got = np.asarray(orthogonal_attention(q, k, v, mask=jnp.asarray(mask)))
    np.testing.assert_allclose(got[0], oracle.attention(q[0], k[0], v[0], np.ones(2)), atol=1e-12)
    short = oracle.attention(q[1, :4], k[1, :4], v[1, :4], np.ones(2))
    np.testing.assert_allclose(got[1, :4], short, atol=1e-12)
    np.testing.assert_array_equal(got[2], 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_one_bad_sample_stays_alone(method, bad):
    """Bit for bit: neither NaN nor an all-zero sample changes its neighbours or their gradients."""
    q, k, v = draw(16, 3, 3, 8, 2, 2, dtype=np.float32)
    clean = pull(q, k, v, np.float32(1), v, method=method)[:4]
    q_bad = q.copy()
    q_bad[1] = bad
    dirty = pull(q_bad, k, v, np.float32(1), v, method=method)[:4]
    assert np.isfinite(dirty[0][1]).all() == (bad == 0.0)
    assert bad != 0.0 or all(np.isfinite(x).all() for x in dirty)
    for got, true in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(got[::2], true[::2])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtypes", [("bfloat16",) * 3, ("float16",) * 3, ("float32", "float32", "bfloat16")])
def test_low_precision(method, dtypes):
    """Computed in float32 from the rounded inputs, rounded once; each cotangent in its input's dtype."""
    q, k, v = (jnp.asarray(x, d) for x, d in zip(inputs(17, 9, 2, 2), dtypes, strict=True))
    bar = jnp.asarray(draw(23, *v.shape), v.dtype)
    with jax.numpy_dtype_promotion("strict"):
        value, *bars, _ = pull(q, k, v, jnp.float32(0.3), bar, method=method)
    assert value.dtype == v.dtype
    assert tuple(str(bar.dtype) for bar in bars) == dtypes
    wide = (np.asarray(x, np.float64) for x in (q, k, v))
    full, *full_bars, _ = pull(*wide, np.float64(np.float32(0.3)), np.asarray(bar, np.float64), method=method)
    ulp = float(jnp.finfo(v.dtype).eps)
    np.testing.assert_allclose(np.asarray(value, np.float64), full, rtol=ulp, atol=ulp / 8)
    for got, true in zip(bars, full_bars, strict=True):
        # Newton-Schulz in Gram space loses eps / sigma^2: 1.2e-5 measured here in float32.
        floor = 5e-5 if method == "newton_schulz" else 1e-5
        assert relative_error(got, true) < 2 * float(jnp.finfo(got.dtype).eps) + floor


def test_weights():
    q, k, _ = inputs(18, 9, 2, 3, dtype=np.float32)
    alpha = np.array([0.2, 3.0], np.float32)
    got = orthogonal_attention_weights(q, k, alpha=alpha)
    assert got.shape == (2, 9, 9)
    nu = alpha.max() * 40
    assert relative_error(got, oracle.rotation(q, k, alpha)) < value_tolerance(np.float32, nu)


def test_cholesky_shift_grows_until_it_succeeds():
    """A Gram matrix with errors beyond 16 eps tr(G): the factor of G + shift is found all the same."""
    good = np.cov(draw(19, 4, 30, dtype=np.float32)).astype(np.float32)
    bad = np.ones((4, 4), np.float32) - 1e-3 * np.eye(4, dtype=np.float32)
    lower = np.asarray(attention_module._shifted_cholesky(jnp.stack([good, bad, 0 * bad])), np.float64)
    product = lower @ lower.swapaxes(1, 2)
    np.testing.assert_allclose(product[0], good, rtol=1e-5, atol=1e-6)
    shift = product[1] - bad
    assert 1e-3 < shift[0, 0] < 0.1
    np.testing.assert_allclose(shift, shift[0, 0] * np.eye(4), atol=1e-5)
    np.testing.assert_array_equal(product[2], np.eye(4))


def test_gradient_of_alpha_alone_and_per_head():
    q, k, v = inputs(20)
    bar, alpha = draw(21, *v.shape), np.array([0.4, 1.5])
    exact = oracle.gradients(q, k, v, alpha, bar).alpha
    f = jax.jit(jax.grad(lambda a: jnp.sum(bar * orthogonal_attention(q, k, v, alpha=a))))
    np.testing.assert_allclose(f(alpha), exact, rtol=1e-12)
    both = oracle.gradients(q, k, v, np.full(2, 0.4), bar).alpha
    np.testing.assert_allclose(f(0.4), both.sum(), rtol=1e-12)


BAD = {
    "rank": ("q[0]", "k[0]", "v[0]", {}, r"query must be \[..., N, H, D\].*got shape \(2, 3\)"),
    "tokens": ("q", "k[:4]", "v", {}, "same number of tokens.*no orthogonal cross attention"),
    "width": ("q", "k[..., :2]", "v", {}, "key must have query's shape"),
    "value": ("q", "k", "v[:5]", {}, r"value must be \[..., N, H, E\]"),
    "zero width": ("q[..., :0]", "k[..., :0]", "v", {}, "at least one head and a width of 1"),
    "no heads": ("q[:, :0]", "k[:, :0]", "v[:, :0]", {}, "at least one head"),
    "int": ("q.astype(int)", "k", "v", {}, "query must be real floating point, got int64: cast it first"),
    "int value": ("q", "k", "v.astype(int)", {}, "value must be real floating point"),
    "complex": ("q", "k.astype(complex)", "v", {}, "key must be real floating point, got complex128"),
    "alpha": ("q", "k", "v", {"alpha": np.ones(3)}, r"alpha must be a scalar or one number per head \[2\]"),
    "mask": ("q", "k", "v", {"mask": np.ones((7, 7), bool)}, "mask must be a boolean.*causal"),
    "mask dtype": ("q", "k", "v", {"mask": np.ones(7)}, "mask must be a boolean array"),
    "method": ("q", "k", "v", {"method": "svd"}, "method must be one of exact, qr,.*got 'svd'"),
    "option": ("q", "k", "v", {"num_iters": 5}, "num_iters and coefficients belong to"),
    "muon": ("q", "k", "v", {"method": "newton_schulz", "coefficients": "muon"}, "muon"),
    "steps": ("q", "k", "v", {"method": "newton_schulz", "num_iters": 0}, "num_iters"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case):
    *expressions, options, message = BAD[case]
    q, k, v = inputs(22)
    args = [eval(e, {"q": q, "k": k, "v": v}) for e in expressions]
    with pytest.raises(ValueError, match=message):
        orthogonal_attention(*args, **options)


def test_errors_under_python_O():
    """Checks must not be assertions."""
    code = """
import numpy as np
from osa_jax import orthogonal_attention
try:
    orthogonal_attention(np.ones((4, 2, 3)), np.ones((5, 2, 3)), np.ones((4, 2, 3)))
except ValueError as error:
    print("refused:", error)
"""
    done = run_python(code, "-O")
    assert done.stdout.startswith("refused: query and key must have the same number of tokens")
