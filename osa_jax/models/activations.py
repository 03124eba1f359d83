"""Activations by name, and what makes them keep a signal through depth: a gain, DKS or TAT.

Without skips and norms nothing restores a signal's scale, so an activation that loses some of it at
every layer makes a deep network silent, and one that bends it too much makes all inputs alike. For
`z, z'` standard normal of correlation c, two maps say what an activation f does to a wide layer:

    Q(q) = E f(sqrt(q) z)^2        the mean square,        which ought to have Q(1) = 1 and Q'(1) = 1
    C(c) = E f(z) f(z')            the cosine similarity,  whose bending, composed over all layers, DKS and TAT fix
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from osa_jax.linalg import compute_dtype

Shaping = Literal["none", "dks", "tat"]
Function = Callable[[jax.Array], jax.Array]

ACTIVATIONS: dict[str, Function] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}

# Of a whole network, the papers' choices: the slope C'(1) (DKS), the curvature C''(1) (TAT) and the
# value C(0) (TAT of ReLU).
_DKS_SLOPE = 1.5
_TAT_CURVATURE = 0.3
_TAT_SIMILARITY = 0.9

# The trapezoidal rule on these nodes: for analytic functions it converges faster than Gauss-Hermite.
_NODES = np.linspace(-10.0, 10.0, 201)
_WEIGHTS = np.exp(-(_NODES**2) / 2) / np.exp(-(_NODES**2) / 2).sum()


@dataclasses.dataclass(frozen=True)
class Activation:
    """`gain (f(scale x + shift) + offset)`, elementwise, at least in float32 inside.

    Args:
      function: the elementwise function f.
      gain: factor on the whole.
      scale: factor on the input.
      shift: added to the scaled input.
      offset: added to the function's value.

    Example:
      >>> import jax.numpy as jnp
      >>> Activation(jnp.tanh, gain=2.0, shift=1.0)(jnp.float32(-1.0)).item()
      0.0
    """

    function: Function
    gain: float = 1.0
    scale: float = 1.0
    shift: float = 0.0
    offset: float = 0.0

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply to an array of any shape; the dtype stays."""
        wide = x.astype(compute_dtype(x))
        return (self.gain * (self.function(self.scale * wide + self.shift) + self.offset)).astype(x.dtype)


def make_activation(
    name: str,
    *,
    gain: float | Literal["preserve"] = 1.0,
    shaping: Shaping = "none",
    depth: int = 1,
) -> Activation:
    """An activation by name, shaped for a network of some depth, times a gain.

    The shapings choose the four numbers of `g (f(a x + b) + d)` so that Q(1) = 1, Q'(1) = 1 and

    * `dks`: C(0) = 0 and C'(1) = 1.5^(1 / depth);
    * `tat`: C'(1) = 1 and C''(1) = 0.3 / depth; `relu` becomes a leaky ReLU instead, see
      `tailored_leaky_relu`.

    Args:
      name: a key of `ACTIVATIONS`.
      gain: a factor on the whole, or `preserve` for the one that gives Q(1) = 1; a shaped activation
        has that already.
      shaping: `none`, `dks` or `tat`.
      depth: the number of activations one after another, that is of blocks in a transformer.

    Returns:
      The activation.

    Raises:
      ValueError: an unknown name or shaping, a gain that is not finite, a depth below 1, or `dks`
        of `relu`.

    Example:
      >>> activation = make_activation("tanh", shaping="tat", depth=24)
      >>> [round(value, 3) for value in (activation.scale, activation.shift, activation.gain, activation.offset)]
      [0.118, 0.535, 11.087, -0.491]
      >>> round(make_activation("relu", gain="preserve").gain ** 2, 4)
      2.0

    Martens et al. (2021), arXiv:2110.01765 (DKS); Zhang et al. (2022), arXiv:2203.08120 (TAT).
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {name!r}.")
    if shaping not in get_args(Shaping):
        raise ValueError(f"activation_shaping must be one of {get_args(Shaping)}, got {shaping!r}.")
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}.")
    if gain != "preserve" and (isinstance(gain, str) or not np.isfinite(gain)):
        raise ValueError(f"activation_gain must be a finite number or 'preserve', got {gain!r}.")
    if shaping == "none":
        activation = Activation(ACTIVATIONS[name])
    elif name != "relu":
        activation = _solve(name, shaping, depth)
    elif shaping == "tat":
        activation = tailored_leaky_relu(depth)
    else:
        raise ValueError(
            "activation_shaping='dks' needs a smooth activation, got 'relu'; take 'gelu', 'silu' or 'tanh', or 'tat'."
        )
    factor = preserving_gain(activation) if gain == "preserve" else float(gain)
    return dataclasses.replace(activation, gain=factor * activation.gain)


def preserving_gain(function: Function) -> float:
    """The gain that keeps the mean square of a standard normal input.

    `1 / sqrt(E f(z)^2)` for `z ~ N(0, 1)`, by the trapezoidal rule.

    Args:
      function: an elementwise function.

    Returns:
      The gain.

    Example:
      >>> import jax
      >>> round(preserving_gain(jax.nn.relu) ** 2, 4)
      2.0

    Martens et al. (2021), section 5; Zhang & Martens (2026), section 4.4.
    """
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        values = np.asarray(function(jnp.asarray(_NODES)))
    return float(1 / np.sqrt(_WEIGHTS @ values**2))


@functools.cache
def tailored_leaky_relu(depth: int) -> Activation:
    """The leaky ReLU that TAT makes of ReLU: Q(q) = q, and C(0) = 0.9 over all layers together.

    `g max(x, s x)` with `g = sqrt(2 / (1 + s^2))`. One layer maps c to
    `c + (1 - s)^2 / (pi (1 + s^2)) (sqrt(1 - c^2) - c arccos c)`; bisection finds the slope s in [0, 1]
    at which `depth` layers map 0 to 0.9. Networks too shallow for that keep s = 0, plain ReLU.

    Args:
      depth: the number of layers.

    Returns:
      The activation.

    Example:
      >>> import jax.numpy as jnp
      >>> round(tailored_leaky_relu(48)(jnp.float32(-1.0)).item(), 3)
      -0.549

    Zhang et al. (2022), arXiv:2203.08120.
    """

    def similarity(slope: float) -> float:
        c = 0.0
        for _ in range(depth):
            bend = (1 - slope) ** 2 / (math.pi * (1 + slope**2))
            c = min(1.0, c + bend * (math.sqrt(1 - c * c) - c * math.acos(c)))
        return c

    low, high = 0.0, 1.0
    if similarity(low) <= _TAT_SIMILARITY:
        high = low
    while high - low > 1e-15:
        middle = (low + high) / 2
        low, high = (middle, high) if similarity(middle) > _TAT_SIMILARITY else (low, middle)
    gain = math.sqrt(2 / (1 + low**2))
    return Activation(functools.partial(jax.nn.leaky_relu, negative_slope=low), gain=gain)


def _mean(values: jax.Array) -> jax.Array:
    """E of values at the nodes."""
    return jnp.sum(_WEIGHTS * values)


def _dks(function: Function, depth: int, scale: jax.Array, shift: jax.Array) -> tuple[jax.Array, ...]:
    """Gain and offset from Q(1) = 1 and C(0) = 0, then what is left of C'(1) and Q'(1)."""
    f, slope = (derivative(scale * _NODES + shift) for derivative in _derivatives(function, 1))
    offset = -_mean(f)
    square = 1 / _mean((f + offset) ** 2)
    excess = _DKS_SLOPE ** (1 / depth) - 1
    q_slope = square * scale * _mean((f + offset) * slope * _NODES)
    c_slope = square * scale**2 * _mean(slope**2)
    return square, offset, (c_slope - 1) / excess - 1, q_slope - 1


def _tat(function: Function, depth: int, scale: jax.Array, shift: jax.Array) -> tuple[jax.Array, ...]:
    """Gain and offset from C'(1) = 1 and Q'(1) = 1, then what is left of C''(1) and Q(1)."""
    f, slope, curvature = (derivative(scale * _NODES + shift) for derivative in _derivatives(function, 2))
    square = 1 / (scale**2 * _mean(slope**2))
    offset = (1 / square - scale * _mean(f * slope * _NODES)) / (scale * _mean(slope * _NODES))
    target = _TAT_CURVATURE / depth
    c_curvature = square * scale**4 * _mean(curvature**2)
    q_value = square * _mean((f + offset) ** 2)
    return square, offset, c_curvature / target - 1, (q_value - 1) / target


def _derivatives(function: Function, order: int) -> Iterator[Function]:
    """The elementwise function and its first derivatives."""
    for _ in range(order + 1):
        yield jax.vmap(function)
        function = jax.grad(function)


@functools.cache
def _solve(name: str, shaping: Shaping, depth: int) -> Activation:
    """Newton's method on log a and b from a grid of starts at once, in float64.

    The equations have several roots; the one of smallest |b| is where f is smooth and far from flat.
    """
    equations = functools.partial({"dks": _dks, "tat": _tat}[shaping], ACTIVATIONS[name], depth)

    def residual(point: jax.Array) -> tuple[jax.Array, jax.Array]:
        square, offset, *left = equations(jnp.exp(point[0]), point[1])
        numbers = jnp.stack([jnp.sqrt(square), jnp.exp(point[0]), point[1], offset])
        return jnp.stack(left), jnp.concatenate([jnp.stack(left), numbers])

    def newton(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        point = state[0]
        ((p, q), (r, s)), found = jax.jacfwd(residual, has_aux=True)(point)
        step = jnp.stack([q * found[1] - s * found[0], r * found[0] - p * found[1]]) / (p * s - q * r)
        return point + jnp.clip(step, -0.3, 0.3), found

    def search(start: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 50, newton, (start, jnp.zeros(6)))[1]

    starts = np.stack(np.meshgrid(np.log(np.geomspace(0.02, 2, 8)), np.linspace(-2, 2, 9)), -1).reshape(-1, 2)
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        ends = np.asarray(jax.jit(jax.vmap(search))(jnp.asarray(starts)))
    roots = ends[np.abs(ends[:, :2]).max(1) < 1e-8, 2:]
    if not len(roots):
        raise ValueError(f"activation_shaping={shaping!r} has no solution for {name!r} at depth {depth}; take another.")
    gain, scale, shift, offset = min(roots.tolist(), key=lambda root: (round(abs(root[2]), 6), -root[2]))
    return Activation(ACTIVATIONS[name], gain=gain, scale=scale, shift=shift, offset=offset)
