"""One function, hand-written derivative rules in both modes.

`jax.custom_vjp` refuses `jax.jvp`, `jacfwd` and `hessian`; `jax.custom_jvp` cannot take a hand-written
adjoint. `custom_vjp` below takes both rules. How it works: the function becomes a `jax.custom_jvp`
whose rule computes ``(out, residuals) = fwd(*args)`` and gets its tangent from ONE linear primitive,

    tangent_out = linear(residuals, tangents; jvp, vjp),

which carries both rules as jaxprs. Forward mode evaluates `jvp`. Transposing the primitive, which is
what reverse mode does, swaps the two. Its own derivative is the primitive again in the (linear)
tangents plus `jax.jvp` of `jvp` in the residuals, so second and higher orders follow from `fwd`, `jvp`
and `bwd` being differentiable themselves.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.interpreters import ad, batching, mlir

Leaves = Sequence[Any]


class custom_vjp:
    r"""A function with a hand-written VJP and, if given, a hand-written JVP.

    Used like `jax.custom_vjp`, with a third rule for forward mode:

    * ``fwd(*args, **static) -> (out, residuals)``
    * ``bwd(residuals, cotangent, **static) -> (cotangent of each positional argument, ...)``
    * ``jvp(residuals, tangents, **static) -> tangent of out``, `tangents` being a tuple with one entry
      for each positional argument. It must be linear in `tangents`, and `bwd` its adjoint.

    Both linear rules see the same residuals. Second order differentiates `fwd` and both rules, so
    they have to be differentiable JAX code (they may call other `custom_vjp` functions).
    Arguments and outputs are pytrees of arrays. Integer and boolean leaves get no cotangent: whatever
    `bwd` returns for them is ignored; their tangent is a `float0` zero. ``None`` in place of a whole
    argument's cotangent stands for zero. Traced values may be passed, or closed over where they
    are not differentiated.

    Args:
      fun: the function. Differentiable arguments are the ones not named in `nondiff_argnames`.
      nondiff_argnames: names of static (hashable, not traced) options; they are handed to every rule
        by keyword.

    Raises:
      AttributeError: on a call before `defvjp`.
      TypeError: in forward mode when no `defjvp` was given; when a rule returns the wrong structure,
        shape or dtype.

    Example:
      >>> import jax
      >>> @custom_vjp
      ... def cube(x):
      ...     return x**3
      >>> cube.defvjp(lambda x: (x**3, x), lambda x, ct: (3 * x**2 * ct,))
      >>> _ = cube.defjvp(lambda x, tangents: 3 * x**2 * tangents[0])
      >>> float(jax.grad(cube)(2.0)), float(jax.jacfwd(jax.grad(cube))(2.0))
      (12.0, 12.0)
    """

    def __init__(self, fun: Callable | None = None, *, nondiff_argnames: Sequence[str] = ()):
        self.nondiff_argnames = tuple(nondiff_argnames)
        self.fwd: Callable | None = None
        self.bwd: Callable | None = None
        self.jvp: Callable | None = None
        if fun is not None:
            self._bind_function(fun)

    def _bind_function(self, fun: Callable) -> None:
        functools.update_wrapper(self, fun)
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.fun = fun
        self.signature = inspect.signature(fun)
        unknown = [n for n in self.nondiff_argnames if n not in self.signature.parameters]
        if unknown:
            raise ValueError(f"nondiff_argnames {unknown} are not arguments of {self.name}")

    def defvjp(self, fwd: Callable, bwd: Callable) -> None:
        """Sets the forward pass with residuals and the adjoint."""
        self.fwd, self.bwd = fwd, bwd

    def defjvp(self, jvp: Callable) -> Callable:
        """Sets the rule for forward mode; returns it, so that it can be used as a decorator."""
        self.jvp = jvp
        return jvp

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself; on the first call of `@custom_vjp(nondiff_argnames=...)`, decorates it."""
        if not hasattr(self, "fun"):  # @custom_vjp(nondiff_argnames=...)
            self._bind_function(*args)
            return self
        if self.fwd is None:
            raise AttributeError(f"no derivative rule for {self.name}: call .defvjp(fwd, bwd) first")
        args, static = self._split(args, kwargs)
        leaves, treedef = tree_util.tree_flatten(args)
        axes = _varying_axes(leaves)

        @jax.custom_jvp
        def primal(*leaves: Any) -> Any:
            return _vary(self.fun(*tree_util.tree_unflatten(treedef, leaves), **static), axes)

        @primal.defjvp
        def rule(leaves: Leaves, tangents: Leaves) -> tuple[Any, Any]:
            return self._tangent(treedef, static, leaves, tangents)

        return primal(*leaves)

    def _split(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        static = {n: bound.arguments[n] for n in self.nondiff_argnames}
        positional: list[Any] = []
        for name, parameter in self.signature.parameters.items():
            if name in static:
                continue
            value = bound.arguments[name]
            variadic = parameter.kind is inspect.Parameter.VAR_POSITIONAL
            positional.extend(value if variadic else (value,))
        return tuple(positional), static

    def _tangent(self, treedef: Any, static: dict[str, Any], leaves: Leaves, tangents: Leaves) -> tuple[Any, Any]:
        """The `custom_jvp` rule: the primal from `fwd`, the tangent from the linear primitive."""
        fwd, bwd, jvp_rule = cast(Callable, self.fwd), cast(Callable, self.bwd), self.jvp
        axes = _varying_axes(leaves) | _varying_axes(tangents)
        leaves, tangents = _vary(leaves, axes), _vary(tangents, axes)
        args = tree_util.tree_unflatten(treedef, leaves)
        out, residuals = _vary(fwd(*args, **static), axes)
        out_leaves, out_tree = tree_util.tree_flatten(out)
        res, res_tree = tree_util.tree_flatten(residuals)
        inputs, outputs = _Inexact(leaves), _Inexact(out_leaves)

        def jvp(res: Leaves, lin: Leaves) -> list[Any]:
            tangents = tree_util.tree_unflatten(treedef, inputs.merge(lin))
            out_dot = cast(Callable, jvp_rule)(tree_util.tree_unflatten(res_tree, res), tangents, **static)
            return _vary(outputs.select(out_dot, out_tree, "jvp", self.name), axes)

        def vjp(res: Leaves, lin: Leaves) -> list[Any]:
            cotangent = tree_util.tree_unflatten(out_tree, outputs.merge(lin))
            cotangents = bwd(tree_util.tree_unflatten(res_tree, res), cotangent, **static)
            cotangents = _none_to_zeros(cotangents, args, self.name)
            return _vary(inputs.select(cotangents, treedef, "bwd", self.name), axes)

        lin = inputs.keep(tangents)
        res, jvp, vjp = _hoist(jvp if jvp_rule else None, vjp, res, lin, outputs.keep(out_leaves))
        out_dot = _linear_p.bind(*res, *lin, jvp=jvp, vjp=vjp, num_res=len(res), name=self.name)
        return out, tree_util.tree_unflatten(out_tree, outputs.merge(out_dot))


class _Inexact:
    """Splits a list of leaves into the differentiable ones and the rest, and puts them together."""

    def __init__(self, leaves: Leaves):
        self.avals = [jax.typeof(x) for x in leaves]
        self.mask = [jnp.issubdtype(a.dtype, jnp.inexact) for a in self.avals]

    def keep(self, leaves: Leaves) -> list[Any]:
        return [x for x, inexact in zip(leaves, self.mask, strict=True) if inexact]

    def merge(self, kept: Leaves) -> list[Any]:
        remaining = iter(kept)
        return [
            next(remaining) if inexact else np.zeros(a.shape, jax.dtypes.float0)
            for a, inexact in zip(self.avals, self.mask, strict=True)
        ]

    def select(self, tree: Any, treedef: Any, rule: str, name: str) -> list[Any]:
        """The differentiable leaves of what a rule returned, checked against what they belong to."""
        try:
            leaves = self.keep(treedef.flatten_up_to(tree))
            if not tree_util.all_leaves(leaves):
                raise ValueError(f"got {tree_util.tree_structure(tree)}")
        except ValueError as error:
            raise TypeError(f"the {rule} rule of {name} must return the structure {treedef}") from error
        for leaf, aval in zip(leaves, self.keep(self.avals), strict=True):
            if (jnp.shape(leaf), jnp.result_type(leaf)) != (aval.shape, aval.dtype):
                got = f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
                want = f"{aval.dtype}{list(aval.shape)}"
                raise TypeError(f"the {rule} rule of {name} must return {want}, got {got}")
        return leaves


def _none_to_zeros(cotangents: Any, args: tuple, name: str) -> tuple:
    if not isinstance(cotangents, tuple | list) or len(cotangents) != len(args):
        raise TypeError(
            f"the bwd rule of {name} must return a tuple of {len(args)} cotangents, one for each "
            f"argument, got {cotangents!r:.80}"
        )
    return tuple(
        tree_util.tree_map(jnp.zeros_like, arg) if ct is None else ct for ct, arg in zip(cotangents, args, strict=True)
    )


def _varying_axes(leaves: Leaves) -> frozenset:
    """The shard_map axes over which any of the leaves varies."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves if _is_array(x)))


def _vary(tree: Any, axes: frozenset) -> Any:
    """Marks every leaf as varying over `axes`: what gives a replicated input its psum in reverse."""

    def vary(x: Any) -> Any:
        missing = tuple(sorted(axes - _varying_axes([x]))) if _is_array(x) else ()
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return tree_util.tree_map(vary, tree)


def _is_array(x: Any) -> bool:
    return getattr(x, "dtype", None) != jax.dtypes.float0


def _hoist(jvp: Callable | None, vjp: Callable, res: list[Any], tangents: Leaves, cotangents: Leaves) -> tuple:
    """The rules as closed jaxprs; traced values they close over become residuals like the others."""
    traced = [
        None if rule is None else jax.make_jaxpr(rule)(res, lin) for rule, lin in ((jvp, tangents), (vjp, cotangents))
    ]
    consts = [[] if closed is None else closed.consts for closed in traced]
    cut, num_consts = len(consts[0]), len(consts[0]) + len(consts[1])
    if num_consts == 0:
        return res, *(None if closed is None else _Rule(closed) for closed in traced)
    res = [*consts[0], *consts[1], *res]

    def close(closed: Any, lo: int, hi: int, lin: Leaves) -> "_Rule | None":
        def call(*operands: Any) -> list[Any]:
            return jax.core.eval_jaxpr(closed.jaxpr, operands[lo:hi], *operands[num_consts:])

        return None if closed is None else _Rule(jax.make_jaxpr(call)(*res, *lin))

    return res, close(traced[0], 0, cut, tangents), close(traced[1], cut, num_consts, cotangents)


class _Rule:
    """A linear rule as a closed jaxpr of (residuals, linear operands).

    Not a bare jaxpr: JAX would want to lower high-level primitives in it before ours is evaluated.
    """

    def __init__(self, closed: jax.extend.core.ClosedJaxpr):
        self.in_avals, self.out_avals = closed.in_avals, closed.out_avals
        self._closed = closed

    def __call__(self, *operands: Any) -> list[Any]:
        return jax.core.eval_jaxpr(self._closed.jaxpr, self._closed.consts, *operands)


# The primitive: linear in its operands after the first `num_res`, the residuals.
_linear_p = jax.extend.core.Primitive("linear_with_transpose")
_linear_p.multiple_results = True


@_linear_p.def_impl
def _evaluate(*operands: Any, jvp: _Rule | None, vjp: _Rule, num_res: int, name: str) -> list[Any]:
    if jvp is None:
        raise TypeError(
            f"forward-mode differentiation of {name}, which has no rule for it: "
            f"give one with {name}.defjvp(jvp), or use reverse mode (jax.grad, jax.vjp, jax.jacrev)"
        )
    return jvp(*operands)


@_linear_p.def_abstract_eval
def _abstract(*operands: Any, jvp: _Rule | None, vjp: _Rule, num_res: int, name: str) -> list[Any]:
    return vjp.in_avals[num_res:] if jvp is None else jvp.out_avals


def _jvp(
    primals: tuple, tangents: tuple, *, jvp: _Rule | None, vjp: _Rule, num_res: int, name: str
) -> tuple[list[Any], list[Any]]:
    """d linear(res, lin) = linear(res, dlin) + (d/dres jvp(res, lin)) dres."""
    params = {"jvp": jvp, "vjp": vjp, "num_res": num_res, "name": name}
    res, lin = primals[:num_res], primals[num_res:]
    res_dot, lin_dot = tangents[:num_res], tangents[num_res:]
    out = _linear_p.bind(*primals, **params)
    out_dot = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out]
    if not all(isinstance(t, ad.Zero) for t in lin_dot):
        out_dot = _linear_p.bind(*res, *map(ad.instantiate_zeros, lin_dot), **params)
    if not all(isinstance(t, ad.Zero) for t in res_dot):
        evaluate = functools.partial(_evaluate, **params)
        _, by_res = jax.jvp(lambda *res: evaluate(*res, *lin), res, tuple(map(ad.instantiate_zeros, res_dot)))
        out_dot = [ad.add_tangents(a, b) for a, b in zip(out_dot, by_res, strict=True)]
    return out, out_dot


def _transpose(cotangents: Leaves, *operands: Any, jvp: _Rule | None, vjp: _Rule, num_res: int, name: str) -> list[Any]:
    res, lin = operands[:num_res], operands[num_res:]
    operands = (*res, *map(ad.instantiate_zeros, cotangents))
    if jvp is None:
        out = vjp(*operands)
    else:
        out = _linear_p.bind(*operands, jvp=vjp, vjp=jvp, num_res=num_res, name=name)
    out = [x if ad.is_undefined_primal(y) else None for x, y in zip(out, lin, strict=True)]
    return [None] * num_res + out


def _batch(
    operands: Leaves, dims: Leaves, *, jvp: _Rule | None, vjp: _Rule, num_res: int, name: str
) -> tuple[list[Any], list[int]]:
    """Maps both rules. Every linear operand is given the batch axis, so that the adjoint has it too."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    res, lin = list(operands[:num_res]), operands[num_res:]
    lin = [batching.bdim_at_front(x, d, size) for x, d in zip(lin, dims[num_res:], strict=True)]

    def mapped(rule: _Rule | None, lin: Leaves) -> _Rule | None:
        if rule is None:
            return None
        axes = [*dims[:num_res], *(0 for _ in lin)]
        return _Rule(jax.make_jaxpr(jax.vmap(rule, axes, axis_size=size))(*res, *lin))

    jvp_mapped = mapped(jvp, lin)
    outs = vjp.in_avals[num_res:] if jvp is None else jvp.out_avals
    out = [_vary(jnp.zeros((size, *a.shape), a.dtype), a.manual_axis_type.varying) for a in outs]
    vjp_mapped = mapped(vjp, out)
    out = _linear_p.bind(*res, *lin, jvp=jvp_mapped, vjp=vjp_mapped, num_res=num_res, name=name)
    return out, [0] * len(out)


ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.primitive_batchers[_linear_p] = _batch
mlir.register_lowering(_linear_p, mlir.lower_fun(_evaluate, multiple_results=True))
