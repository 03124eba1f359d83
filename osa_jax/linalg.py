"""Products at full precision and other small matrix helpers; every leading axis is a batch axis.

Every product of the operator goes through `mm` or `tmm`: TF32 and bfloat16 passes, a device's
default for float32, would leave 3 to 10 bits of the orthogonality of A.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike


def mm(a: Array, b: Array) -> Array:
    """``a b``."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def tmm(a: Array, b: Array) -> Array:
    """``a^T b``; for tall a and b, the sum over the tokens."""
    return mm(transpose(a), b)


def transpose(x: Array) -> Array:
    """x^T, of each matrix."""
    return jnp.swapaxes(x, -1, -2)


def scaled(c: Array, x: Array) -> Array:
    """``c x``, one number for each matrix."""
    return c[..., None, None] * x


def eye_like(x: Array) -> Array:
    """The identity in the shape of the square matrices x."""
    return jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)


def exponent(x: Array) -> Array:
    """The smallest integer e with ``x <= 2^e``, for x >= 0; that of the smallest normal number for 0."""
    return jnp.ceil(jnp.log2(jnp.maximum(x, jnp.finfo(x.dtype).tiny))).astype(jnp.int32)


def power_of_two(n: Array, dtype: jnp.dtype) -> Array:
    """2^n for integers n, exactly: XLA's exp2 alone can be off by a rounding error."""
    return lax.reduce_precision(jnp.exp2(n.astype(dtype)), jnp.finfo(dtype).nexp, 1)


def compute_dtype(*arrays: Array) -> jnp.dtype:
    """float64 if any of the arrays has it, else float32: linear algebra is never done below."""
    return max((at_least_float32(a.dtype) for a in arrays), key=lambda dtype: dtype.itemsize)


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    """The same dtype, or float32 in place of a narrower one."""
    return jnp.dtype(dtype if jnp.finfo(dtype).bits > 32 else jnp.float32)
