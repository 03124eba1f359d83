"""Orthogonal initialisers with the `(key, shape, dtype)` signature of `jax.nn.initializers`.

A kernel maps a row vector from its `in_axis` to its `out_axis`, `x @ kernel`. Every other axis is
a batch axis with independent draws, so the same initialiser serves one matrix, a kernel per head
and a stack of layers:

| kernel | shape | arguments |
|---|---|---|
| one matrix, or a stack of them | `[F, D]`, `[L, F, D]` | the defaults |
| query, key, value per head | `[F, H, D]`, `[L, F, H, D]` | `in_axis=-3` |
| the output per head | `[H, D, F]`, `[L, H, D, F]` | the defaults |
| heads together as one matrix | `[F, H, D]` | `in_axis=-3, out_axis=(-2, -1)` |
| fused along one axis | `[F, H * D]`, `[H * D, F]` | `blockwise(initializer, H, axis=...)` |

Flax flattens the kernels of its general dense layers before it calls their initialiser: there the
fused forms apply.

Shape legend: `L` layers, `F` features, `H` heads, `D` head width.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from osa_jax.linalg import at_least_float32

Axes = int | Sequence[int]
Initializer = Callable[..., jax.Array]


def stiefel(*, in_axis: Axes = -2, out_axis: Axes = -1) -> Initializer:
    """Uniform (Haar) draws from the Stiefel manifold.

    `W^T W = I` when the output is the narrower side, `W W^T = I` when the input is.

    Args:
      in_axis: the kernel's input axis, or axes, which together make the rows of W.
      out_axis: the kernel's output axis, or axes, which together make the columns of W.

    Returns:
      An initialiser. Dtypes below float32 are drawn in float32 and rounded.

    Raises:
      ValueError: when called, an axis outside the shape or named twice, or a dtype that is not a
        real floating type.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> kernel = stiefel(in_axis=-3)(jax.random.key(0), (16, 2, 4), jnp.float32)
      >>> gram = jnp.einsum("fhd,fhe->hde", kernel, kernel)
      >>> bool(jnp.abs(gram - jnp.eye(4)[None]).max() < 1e-5)
      True

    Zhang & Martens (2026), sections 4.1 and 4.2.
    """

    def init(key: jax.Array, shape: Sequence[int], dtype: DTypeLike | None = None) -> jax.Array:
        return _draw(key, tuple(shape), _real_dtype(dtype), in_axis, out_axis)

    return init


def scaled_uniform_orthogonal(*, in_axis: Axes = -2, out_axis: Axes = -1) -> Initializer:
    """Scaled uniform orthogonal (SUO) draws, which keep the mean square of their input.

    `W = max(sqrt(n_out / n_in), 1) U` with `U` from `stiefel`.

    Args:
      in_axis: the kernel's input axis, or axes.
      out_axis: the kernel's output axis, or axes.

    Returns:
      An initialiser. Dtypes below float32 are drawn in float32 and rounded.

    Raises:
      ValueError: as `stiefel`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> kernel = scaled_uniform_orthogonal()(jax.random.key(0), (4, 16), jnp.float32)
      >>> bool(jnp.allclose(kernel @ kernel.T, 4 * jnp.eye(4), atol=1e-5))
      True

    Martens et al. (2021); Zhang & Martens (2026), section 4.4.
    """

    def init(key: jax.Array, shape: Sequence[int], dtype: DTypeLike | None = None) -> jax.Array:
        shape = tuple(shape)
        rows, columns = _matrix_axes(shape, in_axis, out_axis)
        fan_in, fan_out = _size(shape, rows), _size(shape, columns)
        scale = max(math.sqrt(fan_out / fan_in), 1.0) if fan_in else 1.0
        return _draw(key, shape, _real_dtype(dtype), in_axis, out_axis, scale=scale)

    return init


def query_key_stiefel(*, in_axis: Axes = -2, out_axis: int = -1, num_heads: int = 1) -> Initializer:
    """Query and key kernels from one joint draw per head.

    `[W^Q, W^K]` is uniform on the d x 2D Stiefel manifold, so `W^Q W^K^T - W^K W^Q^T` has
    2D singular values 1 and the others 0.

    Args:
      in_axis: the kernel's input axis, or axes, of d features together.
      out_axis: the axis that holds both kernels, of size `2 * num_heads * D`: the queries of every
        head, then the keys.
      num_heads: the heads fused in `out_axis`; 1 for one matrix `[d, 2D]` or a kernel per head
        `[F, H, 2D]` (with `in_axis=-3`).

    Returns:
      An initialiser of the two kernels side by side; split it in halves along `out_axis`.

    Raises:
      ValueError: `num_heads` below 1; when called, an `out_axis` that `2 * num_heads` does not
        divide, 2D > d, or as `stiefel`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> both = query_key_stiefel(num_heads=2)(jax.random.key(0), (16, 16), jnp.float32)
      >>> query, key = (half.reshape(16, 2, 4) for half in jnp.split(both, 2, axis=1))
      >>> bool(jnp.allclose(jnp.einsum("fhd,fhe->hde", query, key), 0, atol=1e-5))
      True

    Zhang & Martens (2026), section 4.2 and Theorem 4.2.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}.")

    def init(key: jax.Array, shape: Sequence[int], dtype: DTypeLike | None = None) -> jax.Array:
        shape = tuple(shape)
        rows, (column,) = _matrix_axes(shape, in_axis, out_axis)
        features, both = _size(shape, rows), shape[column]
        if both % (2 * num_heads):
            raise ValueError(
                f"the size of out_axis must be a multiple of 2 * num_heads = {2 * num_heads}, got "
                f"{both} in shape {shape}; it holds every head's query kernel, then the keys'."
            )
        width = both // (2 * num_heads)
        if 2 * width > features:
            raise ValueError(
                f"the joint query-key draw needs 2 D <= d, got D = {width} and d = {features} from "
                f"shape {shape}; take more heads or a narrower query-key width, or draw the two "
                "kernels on their own with stiefel()."
            )
        per_head = (num_heads, *shape[:column], 2 * width, *shape[column + 1 :])
        pairs = _draw(key, per_head, _real_dtype(dtype), [axis + 1 for axis in rows], column + 1)
        halves = pairs.reshape(num_heads, *shape[:column], 2, width, *shape[column + 1 :])
        return jnp.moveaxis(halves, 0, column + 1).reshape(shape)

    return init


def blockwise(initializer: Initializer, num_blocks: int, *, axis: int = -1) -> Initializer:
    """A fused kernel drawn as `num_blocks` kernels of their own, side by side along one axis.

    Args:
      initializer: draws the stacked blocks; its axes must count from the end, as the defaults do.
      num_blocks: how many kernels the fused one holds, for example the number of heads H, or 3 H
        when query, key and value are one kernel.
      axis: the fused axis.

    Returns:
      An initialiser of the fused kernel.

    Raises:
      ValueError: `num_blocks` below 1; when called, `axis` outside the shape or of a size that
        `num_blocks` does not divide.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> fused = blockwise(stiefel(), 3)(jax.random.key(0), (8, 12), jnp.float32)
      >>> blocks = fused.reshape(8, 3, 4)
      >>> gram = jnp.einsum("fhd,fhe->hde", blocks, blocks)
      >>> bool(jnp.abs(gram - jnp.eye(4)[None]).max() < 1e-5)
      True
    """
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1, got {num_blocks}.")

    def init(key: jax.Array, shape: Sequence[int], dtype: DTypeLike | None = None) -> jax.Array:
        shape = tuple(shape)
        (fused,) = _normalise(axis, shape, "axis")
        if shape[fused] % num_blocks:
            raise ValueError(
                f"num_blocks must divide the fused axis, got {num_blocks} blocks and size "
                f"{shape[fused]} in shape {shape}."
            )
        block = (*shape[:fused], shape[fused] // num_blocks, *shape[fused + 1 :])
        return jnp.moveaxis(initializer(key, (num_blocks, *block), dtype), 0, fused).reshape(shape)

    return init


def _draw(
    key: jax.Array,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    in_axis: Axes,
    out_axis: Axes,
    *,
    scale: float = 1.0,
) -> jax.Array:
    """One Haar matrix for every index of the axes that are neither input nor output."""
    rows, columns = _matrix_axes(shape, in_axis, out_axis)
    batch = tuple(axis for axis in range(len(shape)) if axis not in rows + columns)
    if 0 in shape:
        return jnp.zeros(shape, dtype)
    order = batch + rows + columns
    batch_shape = tuple(shape[axis] for axis in batch)
    matrix = _haar(
        key,
        rows=_size(shape, rows),
        columns=_size(shape, columns),
        count=math.prod(batch_shape),
        dtype=at_least_float32(dtype),
    )
    kernel = matrix.reshape([shape[axis] for axis in order]).transpose(
        [order.index(axis) for axis in range(len(shape))]
    )
    return (scale * kernel).astype(dtype)


@functools.partial(jax.jit, static_argnames=("rows", "columns", "count", "dtype"))
def _haar(key: jax.Array, *, rows: int, columns: int, count: int, dtype: jnp.dtype) -> jax.Array:
    """Haar matrices `[count, rows, columns]`, one by one: on CPUs, jaxlib 0.10's batched QR can deadlock beside another
    one in a jitted program, such as the initialisation of a whole model."""

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.orthogonal(key, rows, (), dtype, m=columns)

    return jax.lax.map(draw, jax.random.split(key, count))


def _matrix_axes(shape: tuple[int, ...], in_axis: Axes, out_axis: Axes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The input and output axes, counted from the front."""
    rows, columns = _normalise(in_axis, shape, "in_axis"), _normalise(out_axis, shape, "out_axis")
    if len(set(rows + columns)) != len(rows + columns):
        raise ValueError(
            f"in_axis and out_axis must name different axes, got {in_axis} and {out_axis} for shape {shape}."
        )
    return rows, columns


def _normalise(axes: Axes, shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    listed = (axes,) if isinstance(axes, int) else tuple(axes)
    for axis in listed:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"{name} must be an axis of the kernel, got {axis} for shape {shape}; a kernel has at least two axes."
            )
    return tuple(axis % len(shape) for axis in listed)


def _size(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    return math.prod(shape[axis] for axis in axes)


def _real_dtype(dtype: DTypeLike | None) -> jnp.dtype:
    real = jnp.dtype(jnp.result_type(float) if dtype is None else dtype)
    if not jnp.issubdtype(real, jnp.floating):
        raise ValueError(
            f"dtype must be a real floating type, got {real.name}; pass float32, bfloat16, float16 or float64."
        )
    return real
