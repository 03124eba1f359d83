r"""Spectral conditioning: fixed corrections C of the query, key and value kernels, `W + C` in every use of W.

C carries no gradient and is no parameter; what is trained and stored is W alone. The two readings of
the paper's `lambda I_k` are the layouts: one rectangular identity for the `F x D` matrix of each head,
or one for the `F x (H D)` matrix of all heads.

Without weight decay, training `W + lambda I` from `W_0` is the same as training W from
`W_0 + lambda I`, because both get the same gradients: `method="identity"` is then an initialisation.

Shapes: `F` features, `H` heads, `D` head width, `P` projections in one kernel (3 in a fused one).
"""

import functools
import math
import numbers
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import GetAttrKey

from osa_jax.linalg import at_least_float32, mm
from osa_jax.polar import scaled_polar

ConditioningMethod = Literal["identity", "svd", "polar"]
Layout = Literal["head", "fused"]

PROJECTIONS = ("query", "key", "value")
FUSED = "qkv"
DEFAULT_SELECT = {name: f"{name}/kernel" for name in (*PROJECTIONS, FUSED)}

WRAPPED = "spectrally_conditioned"
"""The name under which the Flax wrappers hold their module: parameters below it are corrected when used."""

_HEADROOM = 48
"""In eps: how far sigma_max is raised, so that rounding cannot lift kappa(W + C) over 2."""

# By id, those still alive: a corrected array looks like any other.
_corrected: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()


class _Kernel(NamedTuple):
    """A selected leaf of a tree: its place among the leaves, its path, and the projections in it."""

    leaf: int
    path: str
    projections: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each projection."""
        if len(self.projections) == 1:
            return (self.path,)
        return tuple(f"{self.path}[{projection}]" for projection in self.projections)

    @property
    def wrapped(self) -> bool:
        """Whether it belongs to a module that corrects it when called."""
        return WRAPPED in self.path.split("/")


def spectral_condition(
    params: Any,
    *,
    method: ConditioningMethod = "identity",
    lam: float | Mapping[str, float] = 1.0,
    select: str | Mapping[str, str] | None = None,
    heads: int | None = None,
    layout: Layout = "head",
) -> Any:
    r"""The same parameters with `W + C` for the selected kernels, to be called inside the forward pass.

    $$ C = \lambda I \;(\text{identity}), \qquad
       C = \lambda \, \sigma_{\max}(W) \, U V^\top, \; W = U \Sigma V^\top \;(\text{svd, polar}). $$

    With `svd` and `polar`, `kappa(W + C) <= 1 + 1 / lam`, so at most 2 with the default, for any W of
    full rank. `polar` gives the C of `svd` from products alone, all matrices of a shape in one batch,
    for condition numbers up to 1e6 in float32. In directions that W does not have, C is arbitrary but
    finite. Either is computed in float32 at least and `W + C` rounded once. C has no gradient: the
    derivative by W is the identity.

    A kernel is `[F, H, D]`, as Flax's layers have it, or `[F, H * D]` with `heads`. A projection named
    `qkv` stands for kernels that hold query, key and value in this order, `[F, 3, H, D]` or
    `[F, 3 * H * D]`. Axes in front of F, of stacked layers, are allowed where there is an axis of heads
    behind it, `[L, F, H, D]` or `[L, F, 3, H, D]`. Biases are left alone, even when selected.

    Never correct twice: what comes back from here is refused, and so are trees of a wrapped module.
    Plain arrays bear no mark, so after a copy, a file or the border of a transformation this can no
    longer be seen. Store what goes in, never what comes out; the wrappers of `osa_jax.nn` do.

    Args:
      params: any tree: an NNX state, a Linen dict, nested dicts, tuples and lists of floating arrays.
      method: `identity`, `svd` or `polar`.
      lam: the factor lambda; or one for each projection by its name, 0 for those left out. 0 leaves a
        projection as it is. The names in a `qkv` kernel are `query`, `key` and `value`.
      select: a regular expression by the name of the projection, searched in the `/`-joined path; or a
        single one, for kernels of one projection with one `lam`. By default `query/kernel`,
        `key/kernel`, `value/kernel` and `qkv/kernel`, where there are such.
      heads: the number of heads H, for kernels that do not show it.
      layout: `head` corrects the `F x D` matrix of each head, `fused` the `F x (H D)` matrix of all.

    Returns:
      A tree of the same structure, shapes and dtypes. What is not selected is the same object.

    Raises:
      ValueError: an unknown choice, a `lam` that is negative or not finite or names no projection, a
        `select` that matches nothing or a path twice, a kernel that cannot be split into heads, or a
        tree that is corrected already.

    Example:
      >>> params = {"query": {"kernel": jnp.ones((3, 1, 2)), "bias": jnp.zeros((1, 2))}}
      >>> corrected = spectral_condition(params, lam=10.0, select={"query": "query"})
      >>> corrected["query"]["kernel"][:, 0].tolist(), corrected["query"]["bias"] is params["query"]["bias"]
      ([[11.0, 1.0], [1.0, 11.0], [1.0, 1.0]], True)

    References:
      Saratchandran & Lucey (2026), Theorem 3.5 (svd, polar) and Theorem 3.8 (identity).
    """
    _check_options(method, heads, layout)
    paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    leaves = [leaf for _, leaf in paths_and_leaves]
    patterns = _patterns(select)
    factors = _factors(lam, patterns)
    matrices: dict[_Kernel, Array] = {}
    for kernel in _find(paths_and_leaves, patterns, must_match=() if select is None else tuple(patterns)):
        leaf = leaves[kernel.leaf]
        if kernel.wrapped or _corrected.get(id(leaf)) is leaf:
            raise ValueError(
                f"params is corrected already at {kernel.path!r}: correct each kernel once, in the forward pass, and "
                "store the uncorrected ones (those of a wrapper are corrected when it is called)."
            )
        if any(factors[name] for name in kernel.projections):
            matrices[kernel] = _matrices(leaf, kernel, heads, layout)
    for kernel, correction in _corrections(matrices, factors, method).items():
        w = jnp.asarray(leaves[kernel.leaf])
        c = jnp.moveaxis(correction, -2, -4).reshape(w.shape)
        corrected = (w.astype(c.dtype) + c).astype(w.dtype)
        leaves[kernel.leaf] = _corrected[id(corrected)] = corrected
    return jax.tree_util.tree_unflatten(treedef, leaves)


def vanished_gradients(gradient: Any, *, select: str | Mapping[str, str] | None = None) -> dict[str, Array]:
    r"""Which projections get no gradient, as when softmax saturates: every weight 0 or 1 and its slope 0.

    $$ \|g_i\| \le \sqrt{\epsilon} \max_j \|g_j\|, $$

    with the gradients `g_i` of the selected kernels and the rounding unit of float32; false for all
    where there is no gradient at all. What is left of a gradient that vanishes is rounding, times the
    large kernels that have saturated softmax: hence the root.

    Args:
      gradient: a tree like the parameters; what is no bias counts as in `spectral_condition`.
      select: as in `spectral_condition`; by default a tree without such kernels is allowed.

    Returns:
      Path, with `[query]` and the like behind it in a `qkv` kernel, to a boolean scalar.

    Raises:
      ValueError: a `select` that matches nothing or a path twice.

    Example:
      >>> gradient = {"query": {"kernel": jnp.zeros((3, 1, 2))}, "value": {"kernel": jnp.ones((3, 1, 2))}}
      >>> {name: bool(value) for name, value in vanished_gradients(gradient).items()}
      {'query/kernel': True, 'value/kernel': False}
    """
    paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(gradient)
    norms: dict[str, Array] = {}
    patterns = _patterns(select)
    must_match = None if select is None else tuple(patterns)
    for kernel in _find(paths_and_leaves, patterns, must_match=must_match):
        leaf = jnp.asarray(paths_and_leaves[kernel.leaf][1])
        front, inner = _axes(leaf.shape, kernel)
        parts = leaf.astype(at_least_float32(leaf.dtype))
        parts = parts.reshape(math.prod(front), len(kernel.projections), math.prod(inner))
        for name, norm in zip(kernel.names, jnp.sqrt(jnp.sum(parts * parts, axis=(0, 2))), strict=True):
            norms[name] = norm
    if not norms:
        return {}
    largest = functools.reduce(jnp.maximum, norms.values())
    limit = jnp.finfo(jnp.float32).eps ** 0.5 * largest
    return {name: (norm <= limit) & (largest > 0) for name, norm in norms.items()}


def _check_options(method: str, heads: int | None, layout: str) -> None:
    for name, choice, allowed in (("method", method, ConditioningMethod), ("layout", layout, Layout)):
        if choice not in get_args(allowed):
            raise ValueError(f"{name} must be one of {get_args(allowed)}, got {choice!r}.")
    if heads is not None and (not isinstance(heads, int) or heads < 1):
        raise ValueError(f"heads must be a positive integer or None, got {heads!r}.")


def _patterns(select: str | Mapping[str, str] | None) -> dict[str, re.Pattern[str]]:
    """The regular expressions by the projections' names."""
    if select is None:
        select = DEFAULT_SELECT
    named = {"kernel": select} if isinstance(select, str) else select
    try:
        return {name: re.compile(pattern) for name, pattern in named.items()}
    except (re.error, TypeError) as error:
        raise ValueError(f"select must hold regular expressions, got {select!r}: {error}.") from error


def _in_one_kernel(name: str) -> tuple[str, ...]:
    return PROJECTIONS if name == FUSED else (name,)


def _find(
    paths_and_leaves: Sequence[tuple[Any, Any]],
    patterns: Mapping[str, re.Pattern[str]],
    *,
    must_match: tuple[str, ...] | None,
) -> list[_Kernel]:
    """The selected kernels; `must_match` names the patterns that must match something, () some pattern."""
    kernels, matched, paths = [], set(), []
    for index, (path, leaf) in enumerate(paths_and_leaves):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # An NNX variable and a Linen box add the name of their array.
        short = name.removesuffix("/value") if isinstance(path and path[-1], GetAttrKey) else name
        paths.append(short)
        found = [key for key, pattern in patterns.items() if pattern.search(name) or pattern.search(short)]
        if not found or "bias" in name.split("/"):
            continue
        if len(found) > 1:
            raise ValueError(f"select must match each path once, got {found} for {short!r}; narrow one of them.")
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(f"{short!r} must be real floating, got {jnp.result_type(leaf)}; narrow select.")
        matched.add(found[0])
        kernels.append(_Kernel(index, short, _in_one_kernel(found[0])))
    if must_match is not None:
        missed = [repr(patterns[name].pattern) for name in must_match if name not in matched]
        if missed or not matched:
            what = ", ".join(missed or [repr(pattern.pattern) for pattern in patterns.values()])
            raise ValueError(f"select matches nothing with {what}; the paths are {paths[:8]} of {len(paths)}.")
    return kernels


def _factors(lam: float | Mapping[str, float], patterns: Mapping[str, Any]) -> dict[str, float]:
    """Lambda by the projections' names, checked."""
    names = [name for pattern in patterns for name in _in_one_kernel(pattern)]
    given = lam if isinstance(lam, Mapping) else dict.fromkeys(names, lam)
    for name, value in given.items():
        where = f"lam[{name!r}]" if given is lam else "lam"
        if name not in names:
            raise ValueError(f"{where} is of no projection; select has {sorted(set(names))}, by these names.")
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= value < math.inf:
            raise ValueError(f"{where} must be finite and not negative, got {value!r}; 0 leaves W as it is.")
    return {name: float(given.get(name, 0)) for name in names}


def _axes(shape: tuple[int, ...], kernel: _Kernel) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes up to F, and those of one projection behind it: heads and width, or both in one."""
    if len(kernel.projections) == 1:
        if len(shape) >= 2:
            return (shape[:-2], shape[-2:]) if len(shape) > 2 else (shape[:1], shape[1:])
        raise ValueError(f"{kernel.path!r} must be [F, H, D] or [F, H * D], got {shape}; narrow select.")
    if len(shape) >= 4 and shape[-3] == 3:
        return shape[:-3], shape[-2:]
    if len(shape) == 2 and shape[1] % 3 == 0:
        return shape[:1], (shape[1] // 3,)
    raise ValueError(f"{kernel.path!r} must be [F, 3, H, D] or [F, 3 * H * D], got {shape}; narrow select[{FUSED!r}].")


def _matrices(leaf: Any, kernel: _Kernel, heads: int | None, layout: Layout) -> Array:
    """The matrices to correct, `[..., P, H, F, D]` in the dtype to compute in, without a gradient."""
    front, inner = _axes(jnp.shape(leaf), kernel)
    if layout == "fused":
        width = (1, math.prod(inner))
    elif len(inner) == 2 and heads in (None, inner[0]):
        width = (inner[0], inner[1])
    elif len(inner) == 1 and heads is not None and inner[0] % heads == 0:
        width = (heads, inner[0] // heads)
    else:
        raise ValueError(
            f"{kernel.path!r} of shape {jnp.shape(leaf)} cannot be split into heads={heads}: give the layer's number "
            "of heads, or None where the shape shows it."
        )
    wide = jax.lax.stop_gradient(jnp.asarray(leaf)).astype(at_least_float32(jnp.result_type(leaf)))
    return jnp.moveaxis(wide.reshape(*front, len(kernel.projections), *width), -4, -2)


def _corrections(
    matrices: Mapping[_Kernel, Array], factors: Mapping[str, float], method: ConditioningMethod
) -> dict[_Kernel, Array]:
    """C of every kernel in the shape of its matrices; those of one shape are computed together."""
    unit = _UNIT[method]
    together: dict[Any, list[_Kernel]] = {}
    for kernel, w in matrices.items():
        together.setdefault((w.shape[-2:], w.dtype), []).append(kernel)
    corrections = {}
    for kernels in together.values():
        flat = [matrices[kernel].reshape(-1, *matrices[kernel].shape[-2:]) for kernel in kernels]
        parts = jnp.split(unit(jnp.concatenate(flat)), np.cumsum([len(part) for part in flat])[:-1])
        for kernel, part in zip(kernels, parts, strict=True):
            lam = jnp.array([factors[name] for name in kernel.projections], part.dtype)
            shape = matrices[kernel].shape
            corrections[kernel] = lam.reshape((1,) * (len(shape) - 4) + (-1, 1, 1, 1)) * part.reshape(shape)
    return corrections


def _identity(w: Array) -> Array:
    return jnp.broadcast_to(jnp.eye(w.shape[-2], w.shape[-1], dtype=w.dtype), w.shape)


def _svd(w: Array) -> Array:
    left, values, right = jnp.linalg.svd(w, full_matrices=False)
    return _raised(values[..., :1, None] * mm(left, right))


def _polar(w: Array) -> Array:
    return _raised(scaled_polar(w))


def _raised(c: Array) -> Array:
    return c * (1 + _HEADROOM * jnp.finfo(c.dtype).eps)


_UNIT: dict[ConditioningMethod, Callable[[Array], Array]] = {"identity": _identity, "svd": _svd, "polar": _polar}
