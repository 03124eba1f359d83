r"""Singular values, condition numbers, and the Jacobians of attention, dense and matrix-free.

Shapes: ``m x n`` a Jacobian, of a function with m numbers as output and n as input.

Without forming J
-----------------
Golub and Kahan's bidiagonalisation, through forward and reverse mode alone: from ``u_1 = J z / ||J z||``,

    alpha_j v_j = J^T u_j - beta_j v_(j-1),        beta_(j+1) u_(j+1) = J v_j - alpha_j u_j,

orthogonalised against all vectors so far, gives after k steps

    J V = U B,        J^T U = V B^T + alpha_(k+1) v_(k+1) e_(k+1)^T,        B lower bidiagonal, (k+1) x k.

The singular values of B are those of J V, so none exceeds sigma_max(J). Zeros of J do not disturb: every v_j is an
image of J^T, hence ``||J V x|| >= sigma ||x||`` with sigma the smallest singular value of J that is NOT zero, and no
value of B is below it either.

Rounding errors spoil this: each product with J^T leaves some ``eps ||J||`` in the null space, and each step
passes on the part of the step before. So the share of the null space in v is followed,

    content_(j+1)^2 = ((eps ||J||)^2 + (beta_(j+1) content_j)^2) / alpha_(j+1)^2,

and a v that would bring the sum of the squares above `NULL_SHARE` is replaced by a fresh image ``J^T y``, with a
random y in the image of J less that of V: no cancellation, no null space. If that does not help either, V holds all
that can be told from zero, and the steps end. B keeps ``J V = U B`` exactly, with some more entries.

For a triplet ``B q = theta p`` and ``x = V q, y = U p``:  ``J x = theta y`` and ``||J^T y - theta x|| = r`` with
``r = alpha_(k+1) |p_(k+1)|`` (and such a term for each v that was replaced). As ``J^T J x = theta^2 x + theta r w``
with a unit vector w, a non-zero singular value s of J has ``|s^2 - theta^2| <= theta r``, so ``|s - theta| <= r``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from osa_jax.linalg import compute_dtype, mm

Linear = Callable[[Array], Array]

NULL_SHARE = 0.01  # sigma_min is too small by half of it at most


def singular_values(matrix: Array) -> Array:
    r"""The singular values ``sigma_1 >= sigma_2 >= ... >= 0`` of every matrix.

    Differentiable in both modes also where values are repeated or zero: ``d sigma_i = u_i^T dM v_i``, in which the
    vectors of a repeated value are one choice among many.

    Args:
      matrix: ``[..., m, n]``, any floating dtype.

    Returns:
      ``[..., min(m, n)]``, in float32 at least.

    Raises:
      ValueError: if `matrix` is not a floating array of at least two axes, or has no entries.

    Example:
      >>> import jax.numpy as jnp
      >>> singular_values(jnp.array([[0.0, 2.0], [-3.0, 0.0]], jnp.float32)).tolist()
      [3.0, 2.0]
    """
    if not jnp.issubdtype(matrix.dtype, jnp.floating):
        raise ValueError(f"matrix must be real floating point, got {matrix.dtype}: cast it first")
    if matrix.ndim < 2 or 0 in matrix.shape[-2:]:
        raise ValueError(f"matrix must be [..., m, n] with m and n at least 1, got shape {matrix.shape}")
    return jnp.linalg.svd(matrix.astype(compute_dtype(matrix)), compute_uv=False)


def condition_number(matrix: Array, *, effective: bool = False) -> Array:
    r"""The condition number ``kappa = sigma_max / sigma_min`` of every matrix.

    A singular value counts as zero when it is at most ``eps max(m, n) sigma_max``, with the eps of the dtype the
    values are computed in: rounding moves a zero by about that much. Differentiable like `singular_values`; where
    the result is infinite its derivative is 0.

    Args:
      matrix: ``[..., m, n]``, any floating dtype.
      effective: False for sigma_min the smallest of the min(m, n) values: infinite where it counts as zero. True
        for the effective condition number, sigma_min the smallest value that does not count as zero.

    Returns:
      ``[...]``, in float32 at least. A matrix of zeros has no non-zero singular value and is infinite either way; one
      that is not finite is NaN.

    Raises:
      ValueError: as `singular_values`.

    Example:
      >>> import jax.numpy as jnp
      >>> m = jnp.stack([jnp.diag(jnp.array([4.0, 2.0, s])) for s in (1.0, 0.0)])
      >>> condition_number(m).tolist(), condition_number(m, effective=True).tolist()
      ([4.0, inf], [4.0, 2.0])

    Reference: Saratchandran & Lucey 2026, section 3.2; the effective one: Zhang & Martens 2026, section 4.1.
    """
    return extreme_ratio(singular_values(matrix), max(matrix.shape[-2:]), effective=effective)


def extreme_ratio(values: Array, size: int, *, effective: bool = False) -> Array:
    """`condition_number` from the singular values, the largest first; `size` is max(m, n)."""
    top = values[..., :1]
    zero = values <= jnp.finfo(values.dtype).eps * size * top
    if effective:
        last = jnp.maximum(jnp.sum(~zero, -1, keepdims=True) - 1, 0)
        zero, values = (jnp.take_along_axis(x, last, -1) for x in (zero, values))
    zero, values = zero[..., -1], values[..., -1]
    return jnp.where(zero, jnp.inf, top[..., 0] / jnp.where(zero, 1, values))


def attention_jacobian(fn: Callable[[Any], Any], x: Any, *, batch_dims: int = 0) -> Array:
    r"""The Jacobian ``d fn / d x`` as a matrix, for an array or for a tree of parameters.

    By `jax.jacfwd` where x has at most as many numbers as the output, by `jax.jacrev` otherwise.

    Args:
      fn: any function of one array or tree to an array or tree.
      x: where. Arrays of any floating dtype.
      batch_dims: so many leading axes of every array of x are batch axes, whose elements `fn` gets one at a time.
        (Parameters that a batch shares: `jax.vmap` this function over the batch, with `fn` made inside.)

    Returns:
      ``[*batch, m, n]``, in float32 at least. The columns are the numbers of x in the order of `jax.tree.leaves`,
      which sorts the keys of a dict ("key", "query", "value"), and each array in row-major order; so are the rows.

    Raises:
      ValueError: if an array is not floating, has fewer than `batch_dims` axes, or there is nothing to differentiate.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from osa_jax import orthogonal_attention
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 1, 2))
      >>> jacobian = attention_jacobian(lambda value: orthogonal_attention(q, k, value), v)
      >>> jacobian.shape, condition_number(jacobian).round(3).item()  # A kron I, orthogonal
      ((10, 10), 1.0)

    Reference: Zhang & Martens 2026, section 4; Saratchandran & Lucey 2026, equation 4 (transposed there).
    """
    if batch_dims:
        x = _check_batch(x, batch_dims)
        return jax.vmap(lambda element: attention_jacobian(fn, element, batch_dims=batch_dims - 1))(x)
    flat, vector, num_rows = _flattened(fn, x)
    mode = jax.jacfwd if vector.size <= num_rows else jax.jacrev
    return mode(flat)(vector)


class SpectrumEstimate(NamedTuple):
    """The ends of a spectrum, as seen by `jacobian_spectrum`.

    Each `error` is the bound r of the module's text, on the distance of its estimate to SOME non-zero singular value,
    rounding errors (a few eps sigma_max) not counted. `sigma_max` is never above the true one and `sigma_min` never
    below the smallest non-zero one (by more than 0.5 %, what rounding is allowed), so the condition number is estimated
    from below; that no value lies farther out, only ``num_steps = min(m, n)`` can show. `num_matvecs` counts
    products with J or its transpose.
    """

    sigma_max: Array
    sigma_min: Array
    error_max: Array
    error_min: Array
    num_matvecs: Array

    @property
    def condition_number(self) -> Array:
        """The effective condition number; infinite for a Jacobian of zeros."""
        zero = self.sigma_min == 0
        return jnp.where(zero, jnp.inf, self.sigma_max / jnp.where(zero, 1, self.sigma_min))


def jacobian_spectrum(
    fn: Callable[[Any], Any], x: Any, *, num_steps: int = 64, key: Array | None = None, batch_dims: int = 0
) -> SpectrumEstimate:
    r"""The largest and the smallest non-zero singular value of ``d fn / d x``, without forming it.

    By so many steps of Golub-Kahan bidiagonalisation with full reorthogonalisation, each one forward-mode and one
    reverse-mode product; memory for ``num_steps (m + n)`` numbers. sigma_max is right after a few dozen steps.
    sigma_min converges slowly when it is small and others are near it: look at `error_min` beside it. With
    ``num_steps = min(m, n)`` both are exact, down to a sigma_min of about ``10 eps sqrt(num_steps) sigma_max``, below
    which a value counts as zero.

    Zeros (the directions in which W_Q and W_K compensate each other, for one) are not seen, whatever their number: the
    condition number is the effective one. Compile it: ``jax.jit(lambda x: jacobian_spectrum(fn, x))``. Not to be
    differentiated in reverse mode.

    Args:
      fn: any function of one array or tree to an array or tree; its products at full precision.
      x: where. Arrays of any floating dtype.
      num_steps: k, cut to min(m, n).
      key: of the random start vector; `jax.random.key(0)` if None.
      batch_dims: as in `attention_jacobian`.

    Returns:
      The estimates ``[*batch]``, in float32 at least.

    Raises:
      ValueError: if `num_steps` is not positive; otherwise as `attention_jacobian`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> scales = jnp.geomspace(1.0, 100.0, 50).at[20].set(0.0)
      >>> estimate = jacobian_spectrum(lambda x: scales * x, jnp.zeros(50))
      >>> estimate.condition_number.round(2).item()
      100.0

    Reference: Golub & Kahan, "Calculating the singular values and pseudo-inverse of a matrix", 1965; the form of
    Paige & Saunders, "LSQR", 1982.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    if batch_dims:
        x = _check_batch(x, batch_dims)

        def element(x: Any) -> SpectrumEstimate:
            return jacobian_spectrum(fn, x, num_steps=num_steps, key=key, batch_dims=batch_dims - 1)

        return lax.map(element, x)  # one after the other: under vmap every step would pay for a fresh vector
    flat, vector, num_rows = _flattened(fn, x)
    product = jax.linearize(flat, vector)[1]
    transposed = jax.linear_transpose(product, vector)
    key = jax.random.key(0) if key is None else key
    num_steps = min(num_steps, num_rows, vector.size)
    return _estimate(_bidiagonalise(product, lambda u: transposed(u)[0], key, vector, num_steps))


class _Bidiagonalisation(NamedTuple):
    """After `step` steps; rows and columns not reached are zero."""

    step: Array
    left: Array  # U^T [k + 1, m]
    right: Array  # V^T [k, n]
    form: Array  # B [k + 1, k]
    rest: Array  # the norm of what J^T u has outside of V, for each u [k + 1]
    vector: Array  # the next v
    fresh: Array  # whether it is not the one that J^T u asks for
    content: Array  # the share of the null space in it
    spent: Array  # the sum of the squares of these shares
    num_matvecs: Array


def _start(product: Linear, transposed: Linear, z: Array, num_steps: int) -> _Bidiagonalisation:
    u, _ = _unit(product(z))
    v, alpha = _unit(transposed(u))
    return _Bidiagonalisation(
        step=jnp.array(0),
        left=jnp.zeros((num_steps + 1, u.size), z.dtype).at[0].set(u),
        right=jnp.zeros((num_steps, z.size), z.dtype),
        form=jnp.zeros((num_steps + 1, num_steps), z.dtype),
        rest=jnp.zeros(num_steps + 1, z.dtype).at[0].set(alpha),
        vector=v,
        fresh=jnp.array(False),
        content=jnp.full_like(alpha, jnp.finfo(z.dtype).eps),
        spent=jnp.where(alpha == 0, jnp.inf, 0).astype(z.dtype),
        num_matvecs=jnp.array(2),
    )


def _bidiagonalise(product: Linear, transposed: Linear, key: Array, x: Array, num_steps: int) -> _Bidiagonalisation:
    def noise(number: ArrayLike) -> Array:
        return jax.random.normal(jax.random.fold_in(key, number), x.shape, x.dtype)

    def proceed(state: _Bidiagonalisation) -> Array:
        return (state.step < num_steps) & (state.spent <= NULL_SHARE)

    def extend(state: _Bidiagonalisation) -> _Bidiagonalisation:
        step, after = state.step, state.step + 1
        right = state.right.at[step].set(state.vector)
        image = product(state.vector)
        u, beta = _remainder(image, state.left)
        left = state.left.at[after].set(u)
        column = mm(state.left, image)
        form = state.form.at[:, step].set(column.at[after].set(beta))
        v, alpha = _remainder(transposed(u), right)
        rounding = jnp.finfo(x.dtype).eps * jnp.max(jnp.abs(form))
        content = jnp.hypot(rounding, beta * state.content) / alpha
        fresh = ~(state.spent + content**2 <= NULL_SHARE) & (after < num_steps)

        def renew() -> tuple[Array, Array]:
            y, _ = _remainder(product(noise(after)), left)
            new, norm = _remainder(transposed(y), right)
            return new, rounding / norm

        v, content = lax.cond(fresh, renew, lambda: (v, content))
        rest = jnp.sqrt(jnp.maximum(state.rest**2 - column**2, 0))
        rest = rest.at[step].multiply(state.fresh).at[after].set(alpha)
        spent = state.spent + content**2
        num_matvecs = state.num_matvecs + jnp.where(fresh, 4, 2)
        return _Bidiagonalisation(after, left, right, form, rest, v, fresh, content, spent, num_matvecs)

    return lax.while_loop(proceed, extend, _start(product, transposed, noise(0), num_steps))


def _remainder(x: Array, basis: Array) -> tuple[Array, Array]:
    """What is left of x beside the rows of `basis`, as a unit vector and its norm; 0 if it is rounding alone."""
    whole = _unit(x)[1]
    for _ in range(3):  # twice is not enough for remainders as small as the rounding errors of the first time
        x = x - mm(mm(basis, x), basis)
    unit, norm = _unit(x)
    return jnp.where(norm > jnp.finfo(x.dtype).eps * whole, unit, 0), norm


def _unit(x: Array) -> tuple[Array, Array]:
    """x as a unit vector (or 0) and its norm, without underflow."""
    top = jnp.max(jnp.abs(x))
    norm = top * jnp.linalg.norm(x / jnp.where(top == 0, 1, top))
    return x / jnp.where(norm == 0, 1, norm), norm


def _estimate(state: _Bidiagonalisation) -> SpectrumEstimate:
    left, values, _ = jnp.linalg.svd(state.form, full_matrices=False)
    errors = mm(state.rest, jnp.abs(left))
    last = jnp.maximum(state.step - 1, 0)
    return SpectrumEstimate(values[0], values[last], errors[0], errors[last], state.num_matvecs)


def _flattened(fn: Callable[[Any], Any], x: Any) -> tuple[Linear, Array, int]:
    """`fn` from vector to vector, where, and the length of its result."""
    x = jax.tree.map(jnp.asarray, x)
    out = jax.eval_shape(fn, x)
    for name, tree in (("x", x), ("fn(x)", out)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(
                    f"{name}{jax.tree_util.keystr(path)} must be real floating point, got {leaf.dtype}: leave it out "
                    "of what is differentiated"
                )
        if not sum(leaf.size for leaf in jax.tree.leaves(tree)):
            raise ValueError(f"{name} must hold at least one number, got {jax.tree.map(jnp.shape, tree)}")
    vector, unravel = ravel_pytree(x)
    dtype = compute_dtype(*jax.tree.leaves((x, out)))

    def flat(v: Array) -> Array:
        return ravel_pytree(fn(unravel(v.astype(vector.dtype))))[0].astype(dtype)

    return flat, vector.astype(dtype), sum(leaf.size for leaf in jax.tree.leaves(out))


def _check_batch(x: Any, batch_dims: int) -> Any:
    x = jax.tree.map(jnp.asarray, x)
    shapes = {leaf.shape[:batch_dims] for leaf in jax.tree.leaves(x)}
    if batch_dims < 0 or len(shapes) != 1 or len(*shapes) != batch_dims:
        raise ValueError(
            f"x must have {batch_dims} leading batch axes (batch_dims), the same in every array, got shapes "
            f"{[leaf.shape for leaf in jax.tree.leaves(x)]}"
        )
    return x
