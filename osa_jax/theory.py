r"""The bounds of both papers on Jacobians and orthogonality, as functions of the weights and the input.

Shapes: ``N`` tokens, ``F`` features, ``D`` query-key width, ``E`` value width. Every function takes one head as
``[..., F, D]``; leading axes are batch axes, broadcast against each other, so heads are a batch axis too. ``vec``
stacks the columns of a matrix, as in both papers; norms are spectral norms.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from osa_jax.jacobian import extreme_ratio, singular_values
from osa_jax.linalg import compute_dtype, mm, transpose

# Orthogonal Self-Attention


def orthogonality_bound(scores: Array, basis: Array) -> Array:
    r"""How far ``Y = I + B (exp(B^T S B) - I) B^T`` is from orthogonal, for any basis B.

    ``||Y^T Y - I|| <= (e^(s ||S||) - 1)^2 max_i |sigma_i^2 (sigma_i^2 - 1)|`` with sigma_i the singular values of B
    and ``s = max(1, sigma_1^2)``: the paper's statement where no sigma_i exceeds 1, which its proof needs, and which
    Newton-Schulz with other coefficients breaks.

    Args:
      scores: skew-symmetric S ``[..., N, N]``, as `osa_jax.skew_scores` makes it.
      basis: B ``[..., N, R]``, as `osa_jax.newton_schulz_basis` makes it.

    Returns:
      ``[...]``, in float32 at least.

    Raises:
      ValueError: as `osa_jax.singular_values`.

    Example:
      >>> import jax.numpy as jnp
      >>> scores = jnp.array([[0.0, 0.1], [-0.1, 0.0]])
      >>> print(f"{orthogonality_bound(scores, 0.9 * jnp.eye(2)):.4f}")
      0.0017

    Reference: Zhang & Martens 2026, Theorem 3.1.
    """
    # With D = exp(B^T S B) - I, a rotation less I: D + D^T + D^T D = 0, hence Y^T Y - I = B D^T (B^T B - I) D B^T.
    # D = B^T P B for P = sum_n (S B B^T)^(n-1) S / n!, and ||P|| <= (e^(s ||S||) - 1) / s as ||B||^2 <= s. So the
    # norm is at most ||B B^T||^2 ||P||^2 max |sigma^2 (sigma^2 - 1)| with ||B B^T|| <= s.
    scores_values, basis_values = _singular_values_in_turn(scores, basis)
    squares = basis_values**2
    growth = jnp.expm1(jnp.maximum(squares[..., 0], 1) * scores_values[..., 0])
    return growth**2 * jnp.max(jnp.abs(squares * (squares - 1)), -1)


def osa_slope(x: Array, query: Array, key: Array, value: Array, out: Array) -> Array:
    r"""The C of ``||J_1|| <= C |alpha|``: how fast the attention matrix moves the output of OSA with its input.

    ``C = 2 / sqrt(D) ||X W~|| ||X W^V W^O||``, ``W~ = W^Q W^K^T - W^K W^Q^T``.

    J_1 is the part of the Jacobian by X in which A moves: of ``A(X) X W^V W^O``, ``dA X W^V W^O``. For several heads
    with their own alpha, J_1 is the sum over the heads and so is its bound, ``sum_h C_h |alpha_h|``.

    Args:
      x: ``[..., N, F]``, any floating dtype.
      query: W^Q ``[..., F, D]``.
      key: W^K ``[..., F, D]``.
      value: W^V ``[..., F, E]``.
      out: W^O ``[..., E, F]``.

    Returns:
      C ``[...]``, in float32 at least.

    Raises:
      ValueError: if a shape or dtype does not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> w = jnp.eye(4)
      >>> osa_slope(3 * w, w[:, :1], w[:, 1:2], w, w).item()  # all norms 1 but for the input's: 2 * 3^2
      18.0

    Reference: Zhang & Martens 2026, Theorem 4.3, with the constant that its proof leaves open.
    """
    # The derivative of exp at a skew S is dA = int_0^1 e^(t S) dS e^((1-t) S) dt, all rotations: ||dA||_F <= ||dS||_F.
    # S = c X W~ X^T with c = alpha / sqrt(D), hence dS = c (dX W~ X^T + X W~ dX^T) and, W~ being skew,
    # ||dS||_F <= 2 |c| ||X W~|| ||dX||_F. With ||dA X W||_F <= ||dA||_F ||X W|| that is C |alpha| ||dX||_F.
    _check_weights(x, query=query, key=key, value=value)
    if out.ndim < 2 or out.shape[-2:] != (value.shape[-1], x.shape[-1]):
        raise ValueError(
            f"out must be [..., E, F] = [..., {value.shape[-1]}, {x.shape[-1]}] (value's width, x's features), "
            f"got shape {out.shape}"
        )
    turned = mm(mm(x, query), transpose(key)) - mm(mm(x, key), transpose(query))
    turned_values, values = _singular_values_in_turn(turned, mm(mm(x, value), out))
    return 2 / math.sqrt(query.shape[-1]) * turned_values[..., 0] * values[..., 0]


def osa_condition_bound(perturbation: ArrayLike, *, delta: ArrayLike = 0.0) -> Array:
    r"""The bound on the condition number of OSA's Jacobian by X, ``(1 + delta + C alpha) / (1 - delta - C alpha)``.

    J = J_1 + J_2 with ``J_2 = (W^V W^O)^T kron A``, whose non-zero singular values are within delta of 1. It bounds the
    effective condition number: where W^V W^O has not full rank, J_1 and J_2 keep to the same output space, in which
    J_2 is onto.

    Args:
      perturbation: ``C |alpha|``, or for several heads its sum; any shape.
      delta: ``max_i |sigma_i(J_2) - 1|`` over the non-zero singular values: 0 for the exact exponential and
        orthogonal weights.

    Returns:
      The bound, infinite where ``delta + C alpha >= 1``.

    Example:
      >>> osa_condition_bound(0.5).item(), osa_condition_bound(0.5, delta=0.5).item()
      (3.0, inf)

    Reference: Zhang & Martens 2026, Theorem 4.4.
    """
    reach = jnp.asarray(perturbation) + delta
    beyond = reach >= 1
    return jnp.where(beyond, jnp.inf, (1 + reach) / jnp.where(beyond, 1, 1 - reach))


# Softmax attention: A(X) = P X W_V, P = softmax(scale X W_Q W_K^T X^T)
#
# Row i of P has the derivative Lambda_i = diag(p_i) - p_i p_i^T by row i of the scores. With q = X W_Q and so on, and
# M_i = V^T Lambda_i K, L_i = V^T Lambda_i X, the derivatives by the weights act on row i of A as
#
#     dA_i = scale M_i dW_Q^T x_i,        dA_i = scale L_i dW_K q_i,        dA_i = dW_V^T (P X)_i.
#
# This is Theorem 3.3 without its N^2 x N^2 matrices:
#
#     dA/dW_Q = scale (W_V^T X^T kron I_N) Lambda (X W_K kron X)
#     dA/dW_K = scale (W_V^T X^T kron I_N) Lambda (X kron X W_Q) T_FD
#     dA/dW_V = I_E kron P X
#
# with T_FD vec(W) = vec(W^T), which puts the columns in the order of vec(W_K), and Lambda the derivative of
# vec(P) by vec of the scores: the Lambda_i, each spread over the entries i, i + N, i + 2N, ... that row i has in vec.


class AttentionDerivatives(NamedTuple):
    """``d vec(A) / d vec(W)``: by W_Q and W_K ``[..., N E, F D]``, by W_V ``[..., N E, F E]``."""

    query: Array
    key: Array
    value: Array


class _Softmax(NamedTuple):
    query: Array  # X W_Q [..., N, D]
    weights: Array  # P [..., N, N]
    mixed: Array  # P X [..., N, F]
    by_query: Array  # M_i [..., N, E, D]
    by_key: Array  # L_i [..., N, E, F]


def softmax_attention_derivatives(
    x: Array, query: Array, key: Array, value: Array, *, scale: float = 1.0
) -> AttentionDerivatives:
    r"""The derivatives of ``softmax(scale X W_Q W_K^T X^T) X W_V`` by its three weights, in closed form.

    In the paper's convention: vec stacks columns, so that entry (i, e) of the output is row ``e N + i`` and entry
    (f, d) of a weight is column ``d F + f``. The formulas that the paper prints, with Kronecker products and the
    commutation matrix, are right if Lambda is read as the derivative of the row-wise softmax; they stand above
    this function.

    Args:
      x: ``[..., N, F]``, any floating dtype.
      query: W_Q ``[..., F, D]``.
      key: W_K ``[..., F, D]``.
      value: W_V ``[..., F, E]``.
      scale: of the scores; 1 in the paper, ``1 / sqrt(D)`` in most layers.

    Returns:
      The three derivatives, in float32 at least; side by side they are the Jacobian, whose transpose is the paper's
      equation 4.

    Raises:
      ValueError: if a shape or dtype does not fit.

    Example:
      >>> import jax
      >>> x, w = jax.random.normal(jax.random.key(0), (5, 3)), jax.random.normal(jax.random.key(1), (3, 3, 2))
      >>> [derivative.shape for derivative in softmax_attention_derivatives(x, *w)]
      [(10, 6), (10, 6), (10, 6)]

    Reference: Saratchandran & Lucey 2026, Theorem 3.3.
    """
    parts = _softmax_parts(x, query, key, value, scale)
    batch, (tokens, features) = parts.mixed.shape[:-2], x.shape[-2:]
    width, outputs = query.shape[-1], value.shape[-1]

    def outer(subscripts: str, *arrays: Array) -> Array:
        return jnp.einsum(subscripts, *arrays, precision=lax.Precision.HIGHEST)

    x = jnp.broadcast_to(x, (*batch, tokens, features))
    shape = (*batch, outputs * tokens, width * features)
    by_query = scale * outer("...ied,...if->...eidf", parts.by_query, x).reshape(shape)
    by_key = scale * outer("...ief,...id->...eidf", parts.by_key, parts.query).reshape(shape)
    eye = jnp.eye(outputs, dtype=parts.mixed.dtype)
    by_value = outer("eg,...if->...eigf", eye, parts.mixed).reshape(*batch, outputs * tokens, outputs * features)
    return AttentionDerivatives(by_query, by_key, by_value)


def softmax_condition_bound(x: Array, query: Array, key: Array, value: Array, *, scale: float = 1.0) -> Array:
    r"""A bound on the condition number of softmax attention's Jacobian J by its three weights.

    ``kappa(J) <= kappa(P X) sqrt(1 + (a_Q^2 + a_K^2) / ||P X||^2)``, with
    ``a_Q = scale ||X|| max_i ||W_V^T X^T Lambda_i X W_K||_F`` and
    ``a_K = scale ||X W_Q|| max_i ||W_V^T X^T Lambda_i X||_F``.

    It holds for every input, and is finite where P X has rank N, which needs N <= F: then the derivative by W_V alone
    reaches every output and bounds sigma_min(J) from below. With N > F nothing keeps the smallest singular value
    of J away from 0, and the bound is infinite. Compare `spectral_conditioning_bound`, the paper's.

    Args:
      x: ``[..., N, F]``, any floating dtype.
      query: W_Q ``[..., F, D]``.
      key: W_K ``[..., F, D]``.
      value: W_V ``[..., F, E]``.
      scale: of the scores.

    Returns:
      The bound ``[...]``, in float32 at least.

    Raises:
      ValueError: if a shape or dtype does not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> w = jax.random.normal(jax.random.key(0), (3, 4, 2))
      >>> softmax_condition_bound(jnp.eye(4), *w, scale=0.0).item()  # P = 1/N everywhere, of rank 1
      inf
    """
    # J = [J_Q, J_K, J_V], so J J^T = J_Q J_Q^T + J_K J_K^T + J_V J_V^T. From above, ||J||^2 is at most the sum of the
    # three squares, and sum_i ||M_i dW^T x_i||^2 <= max_i ||M_i||^2 ||X dW||_F^2 gives a_Q, likewise a_K. From below,
    # J J^T >= J_V J_V^T = I kron P X (P X)^T, so sigma_min(J) >= sigma_N(P X).
    parts = _softmax_parts(x, query, key, value, scale)
    if x.shape[-2] > x.shape[-1]:
        return jnp.full(parts.mixed.shape[:-2], jnp.inf, parts.mixed.dtype)

    def largest(matrices: Array) -> Array:
        return jnp.max(jnp.linalg.norm(matrices, axis=(-2, -1)), -1)

    mixed, inputs, queries = _singular_values_in_turn(parts.mixed, x, parts.query)
    top = mixed[..., 0]
    by_query = scale * jnp.broadcast_to(inputs[..., 0], top.shape) * largest(parts.by_query)
    by_key = scale * queries[..., 0] * largest(parts.by_key)
    return extreme_ratio(mixed, x.shape[-1]) * jnp.hypot(1, jnp.hypot(by_query, by_key) / jnp.where(top == 0, 1, top))


def spectral_conditioning_bound(x: Array, query: Array, key: Array, value: Array, *, scale: float = 1.0) -> Array:
    r"""The paper's right-hand side, with the effective condition number of Lambda. NOT a bound on every input.

    ``kappa(X)^3 kappa(Lambda) kappa(W_V) (kappa(W_Q) + kappa(W_K)) + kappa(X) kappa(P)``, with kappa(Lambda) over the
    non-zero singular values of all Lambda_i.

    As printed the statement is empty: every ``Lambda_i = diag(p_i) - p_i p_i^T`` has the null vector (1, ..., 1), so
    kappa(Lambda) is infinite. With its effective number the statement is false: all factors are unchanged when W_V is
    multiplied by t, but J = [J_Q, J_K, J_V] is not, as J_Q and J_K grow with t and J_V does not, and its condition
    number can grow without limit in t or 1/t. (The proof takes ``||J z||^2`` for the sum of ``||J_i z||^2`` with
    one z, which is the norm of the blocks above each other.) On inputs of the usual scale it is far above
    kappa(J) nearly always; for what it describes, the influence of the weights' condition, it is kept here as the paper
    plots it. `softmax_condition_bound` is one that holds.

    Args:
      x: ``[..., N, F]``, any floating dtype.
      query: W_Q ``[..., F, D]``.
      key: W_K ``[..., F, D]``.
      value: W_V ``[..., F, E]``.
      scale: of the scores.

    Returns:
      The right-hand side ``[...]``, in float32 at least; infinite where X, a weight or P is rank-deficient.

    Raises:
      ValueError: if a shape or dtype does not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> x = w = jnp.eye(4)
      >>> print(f"{spectral_conditioning_bound(x, w, w, w):.2f}")
      7.13

    Reference: Saratchandran & Lucey 2026, Theorem 3.4.
    """
    _check_weights(x, query=query, key=key, value=value)
    p = _attention_weights(mm(x, query), mm(x, key), scale)
    spread = jnp.vectorize(jnp.diag, signature="(n)->(n,n)")(p) - p[..., :, None] * p[..., None, :]
    *values, slopes = _singular_values_in_turn(x, query, key, value, p, spread)
    kappas = [extreme_ratio(v, max(m.shape[-2:])) for v, m in zip(values, (x, query, key, value, p), strict=True)]
    shape = p.shape[:-2]
    of_x, of_query, of_key, of_value, of_p = (jnp.broadcast_to(kappa, shape) for kappa in kappas)
    slopes = -jnp.sort(-slopes.reshape(*shape, -1))
    of_spread = extreme_ratio(slopes, p.shape[-1] ** 2, effective=True)
    return of_x**3 * of_spread * of_value * (of_query + of_key) + of_x * of_p


def _attention_weights(q: Array, k: Array, scale: float) -> Array:
    scores = scale * mm(q, transpose(k))
    return jax.nn.softmax(scores.astype(compute_dtype(scores)), -1)


def _softmax_parts(x: Array, query: Array, key: Array, value: Array, scale: float) -> _Softmax:
    _check_weights(x, query=query, key=key, value=value)
    dtype = compute_dtype(x, query, key, value)
    x, query, key, value = (array.astype(dtype) for array in (x, query, key, value))
    q, k, v = mm(x, query), mm(x, key), mm(x, value)
    p = _attention_weights(q, k, scale)
    mean_x, mean_k, mean_v = mm(p, x), mm(p, k), mm(p, v)

    def covariances(mean: Array, of: Array) -> Array:
        """V^T Lambda_i Y for every row i: the covariance of v_j and y_j under p_i."""
        return jnp.einsum("...ij,...ie,...if->...jef", transpose(p), v, of, precision=lax.Precision.HIGHEST) - (
            mean_v[..., :, None] * mean[..., None, :]
        )

    return _Softmax(q, p, mean_x, covariances(mean_k, k), covariances(mean_x, x))


def _singular_values_in_turn(*matrices: Array) -> list[Array]:
    """Each factorisation waits for the one before: batched ones side by side can deadlock on CPUs (jaxlib 0.10)."""
    values: list[Array] = []
    for matrix in matrices:
        waiting = lax.optimization_barrier((matrix, values[-1]))[0] if values else matrix
        values.append(singular_values(waiting))
    return values


def _check_weights(x: Array, **weights: Array) -> None:
    for name, array in (("x", x), *weights.items()):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be real floating point, got {array.dtype}: cast it first")
    if x.ndim < 2:
        raise ValueError(f"x must be [..., N, F] (tokens, features), got shape {x.shape}")
    for name, weight in weights.items():
        if weight.ndim < 2 or weight.shape[-2] != x.shape[-1]:
            raise ValueError(
                f"{name} must be [..., F, D] with x's {x.shape[-1]} features, one head, got shape {weight.shape}: "
                "move a kernel's head axis to the front"
            )
    query, key = weights["query"], weights["key"]
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same width, got shapes {query.shape} and {key.shape}")
