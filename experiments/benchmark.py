"""Speed of the operator beside its peers, in one process: `python experiments/benchmark.py`.

Every repeat times each peer once, one after the other, so that what disturbs the machine disturbs all; the table shows
medians and the ratios of the paired times. `bare products` is the floor of any route through the Gram matrix:
``M^T M``, ``M^T V`` and ``M (.)``.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from osa_jax import orthogonal_attention

FLAGS = flags.FLAGS
flags.DEFINE_integer("batch", 1, "Batch size.", lower_bound=1)
flags.DEFINE_integer("tokens", 4096, "N.", lower_bound=1)
flags.DEFINE_integer("heads", 4, "H.", lower_bound=1)
flags.DEFINE_integer("width", 64, "D, the width of queries, keys and values.", lower_bound=1)
flags.DEFINE_float("alpha", 0.1, "Scale of the scores.")
flags.DEFINE_integer("repeats", 9, "Paired repeats.", lower_bound=1)


def bare_products(q, k, v):
    """The products over the tokens alone."""
    m, v = jnp.moveaxis(jnp.concatenate([q, k], -1), -2, -3), jnp.moveaxis(v, -2, -3)
    mt = jnp.swapaxes(m, -1, -2)
    return jnp.moveaxis(m @ ((mt @ m) @ (mt @ v)), -3, -2)


def literal_newton_schulz(q, k, v, *, alpha, num_iters=8):
    """The paper's route as written: the iteration on [Q, K] itself, JAX's expm, derivatives by autodiff."""
    m, v = jnp.moveaxis(jnp.concatenate([q, k], -1), -2, -3), jnp.moveaxis(v, -2, -3)
    b = m / (jnp.linalg.norm(m, axis=(-2, -1), keepdims=True) + 1e-7)
    for _ in range(num_iters):
        b = 1.5 * b - 0.5 * b @ (jnp.swapaxes(b, -1, -2) @ b)
    bt = jnp.swapaxes(b, -1, -2)
    q, k = jnp.split(bt @ m, 2, axis=-1)
    product = q @ jnp.swapaxes(k, -1, -2) * (alpha / np.sqrt(q.shape[-1]))
    rotation = jax.scipy.linalg.expm(product - jnp.swapaxes(product, -1, -2))
    return jnp.moveaxis(v + b @ ((rotation - jnp.eye(b.shape[-1])) @ (bt @ v)), -3, -2)


def peers(alpha):
    """Name -> function of (query, key, value)."""
    return {
        "bare products": bare_products,
        "exact": functools.partial(orthogonal_attention, alpha=alpha),
        "qr": functools.partial(orthogonal_attention, alpha=alpha, method="qr"),
        "newton_schulz": functools.partial(orthogonal_attention, alpha=alpha, method="newton_schulz"),
        "softmax": jax.nn.dot_product_attention,
        "literal Newton-Schulz": functools.partial(literal_newton_schulz, alpha=alpha),
    }


def paired_times(programs, repeats) -> dict[str, np.ndarray]:
    """Seconds of each program, every repeat running all of them."""
    times = {name: [] for name in programs}
    for repeat in range(repeats + 1):  # the first warms up
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: np.array(seconds) for name, seconds in times.items()}


def main(argv):
    """Compiles, measures and prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    shape = (4, FLAGS.batch, FLAGS.tokens, FLAGS.heads, FLAGS.width)
    q, k, v, cotangent = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    forward, both = {}, {}
    for name, function in peers(FLAGS.alpha).items():
        forward[name] = functools.partial(jax.jit(function), q, k, v)
        both[name] = functools.partial(jax.jit(lambda *x, f=function: jax.vjp(f, *x[:3])[1](x[3])), q, k, v, cotangent)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, float32, B, N, H, D = {shape[1:]}")
    print("| | forward ms | / bare | / exact | forward+backward ms | / bare | / exact |\n|---|---|---|---|---|---|---|")
    times = [paired_times(programs, FLAGS.repeats) for programs in (forward, both)]
    for name in forward:
        cells = []
        for seconds in times:
            ratios = [np.median(seconds[name] / seconds[other]) for other in ("bare products", "exact")]
            cells += [f"{1e3 * np.median(seconds[name]):.1f}", *(f"{ratio:.2f}" for ratio in ratios)]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    app.run(main)
