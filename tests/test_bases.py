"""QR and Newton-Schulz bases against NumPy, the literal iteration, and complex steps."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osa_jax import bases
from osa_jax.bases import newton_schulz_basis, newton_schulz_polynomial, qr_basis

SHAPES = [(8, 3), (3, 8), (5, 5), (2, 8, 3), (2, 3, 4, 6), (0, 3), (3, 0), (1, 4)]
SETS = ["cubic", "polar_express"]
# Written out again, so that the table of the package is checked too.
POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115952949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787402, -1.267995827194594, 0.3768040894852514),
]


newton_schulz = jax.jit(newton_schulz_basis, static_argnames=("num_iters", "coefficients"))


def draw(seed, shape, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def with_singular_values(seed, rows, values):
    """A `[rows, len(values)]` matrix."""
    values = np.asarray(values, np.float64)
    left = np.linalg.qr(draw(seed, (rows, values.size)))[0]
    return left * values @ np.linalg.qr(draw(seed + 1, (values.size, values.size)))[0]


def polar(m):
    """U V^T of the singular value decomposition."""
    u, _, vt = np.linalg.svd(np.asarray(m, np.float64), full_matrices=False)
    return u @ vt


def gram_schmidt(m):
    """QR of one (complex) matrix by analytic operations alone, for complex steps."""
    rows, columns = m.shape
    k = min(rows, columns)
    basis, triangular = np.zeros((rows, k), m.dtype), np.zeros((k, columns), m.dtype)
    for j in range(columns):
        v = m[:, j].copy()
        for i in range(min(j, k)):
            triangular[i, j] = basis[:, i] @ v
            v = v - triangular[i, j] * basis[:, i]
        if j < k:
            triangular[j, j] = np.sqrt(v @ v)
            basis[:, j] = v / triangular[j, j]
    return basis, triangular


def literal(m, num_iters, coefficients, xp=np):
    """The iteration over the tokens, as the paper writes it; analytic, so that m may be complex."""
    steps = [(1.5, -0.5, 0.0)] * num_iters
    if coefficients == "polar_express":
        steps = (POLAR_EXPRESS + [(1.875, -1.25, 0.375)] * num_iters)[:num_iters]
    x = m / xp.sqrt(xp.sum(m * m, axis=(-2, -1), keepdims=True))
    for a, b, c in steps:
        gram = xp.swapaxes(x, -2, -1) @ x
        x = a * x + x @ (b * gram + c * (gram @ gram))
    return x


def plain_qr(m):
    """QR for N >= R, differentiated by JAX's own rule."""
    basis, triangular = jnp.linalg.qr(m)
    sign = jnp.sign(jnp.diagonal(triangular, axis1=-2, axis2=-1))
    return basis * sign[..., None, :], triangular * sign[..., :, None]


FUNCTIONS = {
    "qr": (lambda m: tuple(qr_basis(m)), gram_schmidt, plain_qr),
    "cubic": (
        lambda m: (newton_schulz_basis(m, num_iters=3, coefficients="cubic"),),
        lambda m: (literal(m, 3, "cubic"),),
        lambda m: (literal(m, 3, "cubic", jnp),),
    ),
    "polar_express": (
        lambda m: (newton_schulz_basis(m, num_iters=3, coefficients="polar_express"),),
        lambda m: (literal(m, 3, "polar_express"),),
        lambda m: (literal(m, 3, "polar_express", jnp),),
    ),
}


def close(actual, desired, rtol):
    """Relative to the largest entry."""
    desired = np.asarray(desired)
    scale = np.max(np.abs(desired), initial=0)
    np.testing.assert_allclose(np.asarray(actual), desired, rtol=0, atol=rtol * scale)


# Values


@pytest.mark.optimized
@pytest.mark.parametrize("shape", SHAPES)
def test_qr_equals_numpy(shape):
    m = draw(0, shape)
    basis, triangular = jax.jit(qr_basis)(m)
    q, r = np.linalg.qr(m)
    sign = np.where(np.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)
    close(basis, q * sign[..., None, :], 1e-14)
    close(triangular, r * sign[..., :, None], 1e-14)
    assert np.all(np.diagonal(triangular, axis1=-2, axis2=-1) >= 0)
    close(basis @ triangular, m, 1e-14)


def test_qr_sign_patterns_leave_the_same_space_and_a_non_negative_diagonal():
    m = draw(1, (6, 4))
    basis, triangular = map(np.asarray, qr_basis(m))
    for pattern in itertools.product((1.0, -1.0), repeat=4):
        flipped, factor = qr_basis(m * np.array(pattern))
        close(flipped, basis * np.array(pattern), 1e-14)
        close(factor, np.array(pattern)[:, None] * triangular * np.array(pattern), 1e-14)


def test_qr_of_dependent_columns_erases_none():
    for m in ([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]], np.zeros((4, 3)), np.ones((4, 3))):
        basis, triangular = qr_basis(m)
        close(basis.T @ basis, np.eye(basis.shape[1]), 1e-14)
        close(basis @ triangular, m, 1e-14)


@pytest.mark.optimized
@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_equals_polar_factor_and_loop(shape, coefficients):
    m = 0.3 * draw(2, shape) + np.eye(*shape[-2:])
    short = (1, 3)

    @jax.jit
    def evaluate(m):
        options = [{"num_iters": k, "coefficients": coefficients} for k in (*short, None)]
        return [newton_schulz_basis(m, **option) for option in options]

    *unfinished, basis = evaluate(m)
    for num_iters, iterate in zip(short, unfinished, strict=True):
        close(iterate, literal(m, num_iters, coefficients), 1e-12)
    assert basis.shape == shape
    close(basis, polar(m), 1e-12)


def test_defaults_reach_singular_values_of_a_thousandth():
    m = with_singular_values(3, 20, [1.0, 0.5, 2e-3])
    for coefficients in (None, *SETS):
        close(newton_schulz_basis(m, coefficients=coefficients), polar(m), 1e-7)


@pytest.mark.parametrize("coefficients", SETS)
def test_polynomial_is_the_core_of_the_basis(coefficients):
    m = draw(4, (2, 9, 4))
    options = {"num_iters": 7, "coefficients": coefficients}
    polynomial = newton_schulz_polynomial(m.swapaxes(-2, -1) @ m, **options)
    close(m @ np.asarray(polynomial), newton_schulz_basis(m, **options), 1e-13)


@pytest.mark.parametrize(
    "coefficients, smallest, num_iters, left",
    [
        ("cubic", 1e-1, 8, 1.72e-3),
        ("cubic", 1e-1, 10, 2.98e-11),
        ("cubic", 1e-2, 12, 0.107),
        ("cubic", 1e-2, 15, 2.45e-7),
        ("cubic", 1e-3, 15, 0.583),
        ("cubic", 1e-3, 20, 6.37e-5),
        ("cubic", 1e-3, 21, 6.09e-9),
        ("polar_express", 1e-2, 6, 1.18e-3),
        ("polar_express", 1e-2, 7, 4.16e-9),
        ("polar_express", 1e-3, 6, 1.18e-3),
        ("polar_express", 1e-3, 7, 4.16e-9),
        ("polar_express", 1e-3, 8, 2.2e-16),
    ],
)
def test_table_of_iterations(coefficients, smallest, num_iters, left):
    """The largest |1 - sigma| on [smallest, 1], of matrices with the values s, sqrt(1 - s^2)."""
    s = np.concatenate([[0.0], np.geomspace(smallest, np.sqrt(0.5), 4001)])
    angle = np.array([[0.6, -0.8], [0.8, 0.6]])
    m = angle @ (np.stack([s, np.sqrt(1 - s**2)], -1)[:, :, None] * angle)
    out = newton_schulz(m, num_iters=num_iters, coefficients=coefficients)
    values = np.linalg.svd(out, compute_uv=False)
    rounding = 20 * np.finfo(np.float64).eps / smallest**2
    error = max(np.max(np.abs(1 - values[1:])), abs(1 - values[0, 0]))
    assert abs(error - left) <= 0.01 * left + rounding
    if coefficients == "cubic":
        assert values.max() <= 1 + rounding


@pytest.mark.parametrize("num_iters", [1, 2, 5, 12, 20])
def test_cubic_singular_values_never_exceed_one(num_iters):
    """The setting of Theorem 3.1."""
    values = np.geomspace(1e-2, 1, 6)
    m = with_singular_values(5, 16, values / np.linalg.norm(values))
    for dtype in (np.float32, np.float64):
        basis = newton_schulz(m.astype(dtype), num_iters=num_iters, coefficients="cubic")
        largest = np.linalg.svd(np.asarray(basis, np.float64), compute_uv=False)[0]
        assert largest <= 1 + np.finfo(dtype).eps / 1e-4


# Scale, rank, dtype


@pytest.mark.optimized
@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e6, 1e30])
def test_newton_schulz_does_not_see_the_scale(scale, coefficients):
    m = draw(6, (2, 32, 4), np.float32)
    basis = newton_schulz(m * np.float32(scale), num_iters=20, coefficients=coefficients)
    close(basis, polar(m), 1e-6)
    gram = np.asarray(basis, np.float64).swapaxes(-2, -1) @ np.asarray(basis, np.float64)
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(4), gram.shape), atol=1e-6)


@jax.jit
def value_and_pullback(m, cotangents):
    """Of both bases, with their default options."""
    out, pullback = jax.vjp(lambda m: (*qr_basis(m), newton_schulz_basis(m)), m)
    return *out, *pullback(cotangents)


@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((8, 3), jnp.float32),
        ((8, 3), jnp.bfloat16),
        ((8, 3), jnp.float16),
        ((2, 3, 8), jnp.bfloat16),
    ],
)
def test_low_precision_is_computed_in_float32_and_rounded_once(shape, dtype):
    m = jnp.asarray(0.3 * draw(7, shape) + np.eye(*shape[-2:]), dtype)
    *batch, k = *shape[:-2], min(shape[-2:])
    shapes = (*batch, shape[-2], k), (*batch, k, shape[-1]), shape
    for only in range(3):
        cotangents = [jnp.asarray(draw(8, s) * (i == only), dtype) for i, s in enumerate(shapes)]
        actual = value_and_pullback(m, tuple(cotangents))
        wide = tuple(x.astype(jnp.float64) for x in cotangents)
        expected = value_and_pullback(m.astype(jnp.float64), wide)
        eps = max(float(jnp.finfo(dtype).eps) / 2, 100 * float(jnp.finfo(jnp.float32).eps))
        for x, y in zip(actual, expected, strict=True):
            assert x.dtype == dtype
            close(x.astype(jnp.float64), y, eps)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_newton_schulz_of_the_largest_numbers(dtype):
    m = (jnp.asarray(draw(9, (64, 4))).clip(-1, 1) * float(jnp.finfo(dtype).max)).astype(dtype)
    eps = max(float(jnp.finfo(dtype).eps), 1e-6)
    close(newton_schulz_basis(m).astype(jnp.float64), polar(m.astype(jnp.float64)), eps)


@pytest.mark.parametrize("coefficients", SETS)
def test_zero_matrix_gives_zero_and_finite_derivatives(coefficients):
    def fun(m):
        return newton_schulz_basis(m, num_iters=5, coefficients=coefficients)

    @jax.jit
    def evaluate(m):
        out, pullback = jax.vjp(fun, m)
        _, dot = jax.jvp(fun, (m,), (jnp.ones_like(m),))
        gram_bar = jax.grad(lambda g: jnp.sum(newton_schulz_polynomial(g)))(m[1, :4])
        return out, *pullback(jnp.ones_like(m)), dot, gram_bar

    m = draw(10, (3, 8, 4), np.float32)
    m[1] = 0
    with jax.debug_nans(True):
        out, bar, dot, gram_bar = evaluate(m)
    assert not np.any(out[1])
    for x in (out, bar, dot, gram_bar):
        assert np.all(np.isfinite(x))
    m[1] = 1
    close(bar[::2], evaluate(m)[1][::2], 0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_stays_in_its_sample(name):
    fun = jax.jit(FUNCTIONS[name][0])
    m = draw(11, (3, 8, 4), np.float32)
    clean = fun(m)
    m[1, 2, 3] = np.nan
    for x, y in zip(fun(m), clean, strict=True):
        np.testing.assert_array_equal(x[::2], y[::2])


@pytest.mark.parametrize("coefficients, num_iters", [("cubic", 60), ("polar_express", 30)])
def test_dependent_columns_never_diverge(coefficients, num_iters):
    """Rounding makes some eigenvalues of these Gram matrices negative."""
    q, noise, common = draw(12, (130, 32)), draw(13, (130, 32)), 100 * draw(14, (130, 1))
    cases = [
        np.hstack([q, q]),
        np.hstack([q, q + 1e-4 * noise]),
        np.hstack([q + common, noise + common]),
        np.ones((130, 64)),
    ]
    m = np.stack(cases).astype(np.float32)
    basis = newton_schulz(m, num_iters=num_iters, coefficients=coefficients)
    values = np.linalg.svd(np.asarray(basis, np.float64), compute_uv=False)
    assert values.max() < 1.1
    np.testing.assert_allclose(values[0, :32], 1, atol=1e-3)
    np.testing.assert_allclose(values[0, 32:], 0, atol=1e-2)


# Derivatives


def both_modes(fun):
    """The tangent along a direction and the cotangent, in one program."""

    @jax.jit
    def evaluate(m, direction, cotangents):
        _, dot = jax.jvp(fun, (m,), (direction,))
        return dot, jax.vjp(fun, m)[1](cotangents)[0]

    return evaluate


@pytest.mark.parametrize("shape", [(8, 3), (3, 8), (5, 5), (1, 4)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_rules_equal_the_complex_step(name, shape):
    fun, oracle, _ = FUNCTIONS[name]
    m, direction = draw(20, shape), draw(21, shape)
    step = 1e-30
    expected = [x.imag / step for x in oracle(m + 1j * step * direction)]
    cotangents = tuple(draw(22 + i, x.shape) for i, x in enumerate(expected))
    dot, bar = both_modes(fun)(m, direction, cotangents)
    for x, y in zip(dot, expected, strict=True):
        close(x, y, 1e-11)
    pairing = sum(np.sum(c * y) for c, y in zip(cotangents, expected, strict=True))
    scale = np.linalg.norm(bar) * np.linalg.norm(direction)
    assert abs(np.sum(bar * direction) - pairing) <= 1e-12 * scale


@pytest.mark.parametrize("shape", [(32, 8), (2, 3, 5, 4)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rules_equal_plain_autodiff_and_did_run(name, shape):
    fun, _, plain = FUNCTIONS[name]
    m, direction = draw(30, shape), draw(31, shape)
    out = jax.eval_shape(fun, m)
    cotangents = tuple(draw(32 + i, x.shape) for i, x in enumerate(out))
    dots, bar = both_modes(fun)(m, direction, cotangents)
    plain_dots, plain_bar = both_modes(plain)(m, direction, cotangents)
    for x, y in zip((*dots, bar), (*plain_dots, plain_bar), strict=True):
        close(x, y, 1e-10)
    assert np.any(np.asarray(bar) != np.asarray(plain_bar))


@pytest.mark.parametrize("name", ["_qr", "_tall_basis", "_gram_polynomial"])
def test_each_rule_is_called(name, monkeypatch):
    called = []
    function = getattr(bases, name)

    def counted(rule):
        original = getattr(function, rule)

        def call(*args, **static):
            called.append(rule)
            return original(*args, **static)

        return call

    for rule in ("fwd", "bwd", "jvp"):
        monkeypatch.setattr(function, rule, counted(rule))
    fun = {
        "_qr": lambda m: qr_basis(m).basis,
        "_tall_basis": newton_schulz_basis,
        "_gram_polynomial": lambda m: newton_schulz_polynomial(m.T @ m),
    }[name]
    jax.eval_shape(jax.jacrev(fun), draw(33, (4, 2)))
    assert {"fwd", "bwd"} <= set(called)
    called.clear()
    jax.eval_shape(jax.jacfwd(fun), draw(33, (4, 2)))
    assert {"fwd", "jvp"} <= set(called)


def derivatives(fun, orders):
    """Everything the transformations give, in one program."""

    def scalar(m):
        return sum(jnp.sum(draw(70 + i, x.shape) * jnp.sin(x)) for i, x in enumerate(fun(m)))

    def loop(m):
        return jax.lax.scan(lambda m, _: (m + 0.5 * fun(m)[0], None), m, length=3)[0]

    @jax.jit
    def evaluate(m, direction):
        batch = jnp.stack([m, 2 * m + direction])
        return {
            "gradient": [transform(scalar)(m) for transform in orders[0]],
            "hessian": [outer(inner(scalar))(m) for outer, inner in orders[1]],
            "vmap of grad": jax.vmap(jax.grad(scalar))(batch),
            "scan": jax.jacrev(loop)(m),
        }

    return evaluate


def checkpointed(scalar):
    return jax.grad(jax.checkpoint(scalar))


@pytest.mark.parametrize("name", ["qr", "polar_express"])
def test_every_order_and_transformation(name):
    fun, _, plain = FUNCTIONS[name]
    m, direction = jnp.asarray(draw(40, (4, 2))), jnp.asarray(draw(41, (4, 2)))
    modes = (jax.jacfwd, jax.jacrev)
    ours = derivatives(fun, ((*modes, checkpointed), ((jax.jacfwd, jax.jacrev), (jax.jacrev, jax.jacrev))))
    theirs = derivatives(plain, ((jax.grad,), ((jax.jacfwd, jax.jacrev),)))
    actual, expected = ours(m, direction), theirs(m, direction)
    for key, values in actual.items():
        for i, value in enumerate(values if isinstance(values, list) else [values]):
            wanted = expected[key]
            close(value, wanted[i % len(wanted)] if isinstance(wanted, list) else wanted, 1e-10)


def test_wide_qr_second_order():
    """JAX has no rule for a wide QR: its square part, and a product."""

    def plain(m):
        basis, triangular = plain_qr(m[:, :2])
        return basis, jnp.concatenate([triangular, basis.T @ m[:, 2:]], -1)

    def hessian(fun):
        return jax.jit(jax.hessian(lambda m: sum(jnp.sum(jnp.sin(x)) for x in fun(m))))

    m = jnp.asarray(draw(42, (2, 3)))
    close(hessian(FUNCTIONS["qr"][0])(m), hessian(plain)(m), 1e-12)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", ["qr", "cubic"])
def test_low_precision_cotangents_pass_through_a_scan(name, dtype):
    fun = FUNCTIONS[name][0]

    def loop(m):
        return jax.lax.scan(lambda m, _: (fun(m)[0], None), m, length=2)[0]

    m = jnp.asarray(draw(50, (4, 2)), dtype)
    jacobian = jax.jit(jax.jacrev(loop))(m)
    assert jacobian.dtype == dtype
    close(
        jacobian.astype(jnp.float64),
        jax.jit(jax.jacfwd(loop))(m.astype(jnp.float64)),
        8 * float(jnp.finfo(dtype).eps),
    )


# Form: precision, cost, types


def products(fun, *args):
    """The lines of the products in the lowered program."""
    text = jax.jit(fun).lower(*args).as_text()
    return [line for line in text.splitlines() if "stablehlo.dot_general" in line]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_product_asks_for_the_highest_precision(name):
    m = jnp.asarray(draw(60, (8, 3)), jnp.float32)
    with jax.default_matmul_precision("bfloat16"):
        lines = products(jax.grad(lambda m: sum(map(jnp.sum, FUNCTIONS[name][0](m)))), m)
    assert lines
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in lines)


def test_newton_schulz_reads_the_tokens_once():
    m = jnp.asarray(draw(61, (37, 5)))

    def fun(m, num_iters):
        return newton_schulz_basis(m, num_iters=num_iters)

    for num_iters in (3, 9):
        forward = products(lambda m, k=num_iters: fun(m, k), m)
        reverse = products(jax.grad(lambda m, k=num_iters: jnp.sum(fun(m, k) ** 2)), m)
        assert sum("37" in re.findall(r"\d+", line) for line in map(shapes, forward)) == 2
        assert sum("37" in re.findall(r"\d+", line) for line in map(shapes, reverse)) == 5
        assert not any("37x37" in line for line in forward + reverse)


def shapes(line):
    return line.rsplit(":", 1)[1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_strict_promotion(name):
    m = jnp.asarray(draw(62, (2, 5, 3)), jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(jax.jacrev(FUNCTIONS[name][0]), m)
        jax.eval_shape(jax.jacfwd(FUNCTIONS[name][0]), m)


# Refusals


@pytest.mark.parametrize("fun", [newton_schulz_basis, newton_schulz_polynomial])
@pytest.mark.parametrize(
    "options, words",
    [
        ({"coefficients": "muon"}, "muon.*does not converge to 1.*polar_express"),
        ({"coefficients": "quintic"}, "coefficients must be one of 'cubic', 'polar_express'"),
        ({"num_iters": 0}, "num_iters must be a positive integer or None, got 0"),
        ({"num_iters": -3}, "num_iters .* got -3"),
        ({"num_iters": 2.5}, "num_iters .* got 2.5"),
        ({"num_iters": True}, "num_iters .* got True"),
        ({"num_iters": "8"}, "num_iters .* got '8'"),
    ],
)
def test_newton_schulz_options_are_checked(fun, options, words):
    with pytest.raises(ValueError, match=words):
        fun(np.eye(3), **options)


@pytest.mark.parametrize("fun", [qr_basis, newton_schulz_basis, newton_schulz_polynomial])
@pytest.mark.parametrize(
    "m, words",
    [
        (np.ones(3), r"must be a matrix .* got shape \(3,\)"),
        (np.ones((3, 3), np.int32), "must be real floating, got int32"),
        (np.ones((3, 3), np.complex64), "must be real floating, got complex64"),
    ],
)
def test_matrix_is_checked(fun, m, words):
    with pytest.raises(ValueError, match=words):
        fun(m)


def test_gram_has_to_be_square():
    with pytest.raises(ValueError, match=r"gram must be square, got shape \(3, 2\)"):
        newton_schulz_polynomial(np.ones((3, 2)))
