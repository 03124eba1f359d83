"""A dense form of the operator for plain autodiff, and inputs on which it is compared.

exp(S) is its Taylor series, for scores of norm 2 at most. For Newton-Schulz the reference is the
paper's iteration as it is written. One head's query, key, value and alpha are one vector.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from experiments import oracle
from osa_jax import orthogonal_attention
from tests.helpers import gradient_tolerance, relative_error

TOKENS, WIDTH, VALUE_WIDTH, NU, STEPS = 7, 3, 2, 2.0, 2
METHODS = {
    "exact": {"method": "exact"},
    "qr": {"method": "qr"},
    "dense": {"method": "dense"},
    "newton_schulz": {"method": "newton_schulz", "num_iters": STEPS, "coefficients": "cubic"},
}
FAMILIES = ("generic", "K = Q", "K = Q + 1e-4 noise", "duplicate tokens", "dead column", "zero")
TOLERANCE = gradient_tolerance(np.float64, NU)
WEIGHTS = np.random.default_rng(0).integers(-15, 16, (TOKENS, 1, VALUE_WIDTH)) / 8


def attend(method):
    """The library's operator."""
    return functools.partial(orthogonal_attention, **METHODS[method])


def taylor(s):
    eye = jnp.broadcast_to(jnp.eye(s.shape[-1]), s.shape)
    return lax.scan(lambda a, k: (eye + s @ a / k, None), eye, jnp.arange(25.0, 0.0, -1.0))[0]


def skew(q, k, alpha):
    product = jnp.einsum("nhd,mhd->hnm", q, k)
    return alpha[:, None, None] / np.sqrt(q.shape[-1]) * (product - product.mT)


def dense(q, k, v, *, alpha):
    return jnp.einsum("hnm,mhe->nhe", taylor(skew(q, k, alpha)), v)


def newton_schulz(q, k, v, *, alpha):
    b = jnp.concatenate([q, k], -1).swapaxes(0, 1)
    square = jnp.sum(b**2, (1, 2), keepdims=True)
    b = b / jnp.sqrt(jnp.where(square > 0, square, 1.0))
    for _ in range(STEPS):
        b = 1.5 * b - 0.5 * b @ (b.mT @ b)
    turn = taylor(b.mT @ skew(q, k, alpha) @ b) - jnp.eye(b.shape[-1])[None]
    return v + jnp.einsum("hnr,hrs,hms,mhe->nhe", b, turn, b, v)


def reference(method):
    """What `attend(method)` is compared with."""
    return newton_schulz if method == "newton_schulz" else dense


def arguments(family, tokens):
    rng = np.random.default_rng(3)
    if family == "zero":
        q = k = np.zeros((tokens, WIDTH))
    else:
        q, k = oracle.query_key(rng, family, tokens, WIDTH)
        scale = np.sqrt(NU * np.sqrt(WIDTH)) / np.linalg.norm(np.concatenate([q, k], 1), 2)
        q, k = q * scale, k * scale
    v = rng.standard_normal((tokens, 1, VALUE_WIDTH))
    return q[:, None], k[:, None], v, np.array([0.9])


def families(tokens=TOKENS):
    """One vector for each family `[F, X]`, and the function that takes a vector apart."""
    vectors, unravel = zip(*(ravel_pytree(arguments(f, tokens)) for f in FAMILIES), strict=True)

    def unpack(x):
        return [part.astype(x.dtype) for part in unravel[0](x.astype(jnp.float64))]

    return jnp.stack(vectors), unpack


X, UNPACK = families()


def output(attend, x, unpack=UNPACK):
    q, k, v, alpha = unpack(x)
    return attend(q, k, v, alpha=alpha)


def loss(attend, x, unpack=UNPACK):
    y = output(attend, x, unpack)
    return jnp.vdot(WEIGHTS[: len(y)].astype(y.dtype), y)


def assert_close(got, expected, tolerance):
    """Family by family."""
    for one, true, family in zip(got, expected, FAMILIES, strict=True):
        error = relative_error(one, true)
        assert error <= tolerance, f"{family}: {error}"
