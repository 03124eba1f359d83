"""Errors of every exact method against float64, as a Markdown table: `python -m experiments.accuracy`.

For each family of inputs and each nu the table shows the largest error over the shapes, divided by
its bound: below 1 the bound holds.
"""

import jax
import numpy as np
from absl import app, flags

from experiments import oracle
from osa_jax import orthogonal_attention

FLAGS = flags.FLAGS
METHODS = ["exact", "qr", "dense", "auto"]
DTYPES = ["float32", "float64"]
flags.DEFINE_list("methods", METHODS, "Methods to measure.")
flags.DEFINE_list("widths", ["1", "2", "8", "64"], "Query-key widths D.")
flags.DEFINE_list("dtypes", DTYPES, "Data types.")
flags.register_validator("methods", lambda names: set(names) <= set(METHODS), f"--methods must be of {METHODS}.")
flags.register_validator(
    "widths", lambda sizes: all(s.isdigit() and int(s) for s in sizes), "--widths must be positive."
)
flags.register_validator("dtypes", lambda names: set(names) <= set(DTYPES), f"--dtypes must be of {DTYPES}.")
flags.DEFINE_bool("quick", False, "One N above 2D for each width only.")


def token_counts(width: int) -> list[int]:
    """Below, at and above 2D."""
    return sorted({max(2, 3 * width // 2), 2 * width, 2 * width + 2, 2 * width + 40})


def orthogonality_bound(nu: np.ndarray, dtype) -> np.ndarray:
    """The bound on ||A^T A - I||: 1e-5 in float32 up to nu = 100, else 20 eps (1 + nu)."""
    bound = 20 * np.finfo(dtype).eps * (1 + nu)
    return np.where(nu <= 100, 1e-5, bound) if dtype == np.float32 else bound


def measure(method: str, tokens: int, width: int, dtype, nus=oracle.NU) -> dict[str, np.ndarray]:
    """Errors over bounds by case: value, gradient, orthogonality; and the orthogonality error."""
    cases = oracle.cases(tokens, width, dtype, nus)
    q, k, v, alpha = args = cases[:4]
    v_bar = np.random.default_rng(1).standard_normal(v.shape).astype(dtype)
    # One program for everything: the identity, beside the values, shows A.
    eye = np.broadcast_to(np.eye(tokens, dtype=dtype)[:, None], (tokens, len(cases.nu), tokens))

    @jax.jit
    def pull(q, k, v, alpha, bar):
        y, back = jax.vjp(lambda *args: orthogonal_attention(*args[:3], alpha=args[3], method=method), q, k, v, alpha)
        return y, *back(bar)

    bar = np.concatenate([v_bar, np.zeros_like(eye)], -1)
    y, q_bar, k_bar, ve_bar, alpha_bar = pull(q, k, np.concatenate([v, eye], -1), alpha, bar)
    gradients = (q_bar, k_bar, ve_bar[..., : v.shape[-1]], alpha_bar)
    a = np.asarray(y[..., v.shape[-1] :], np.float64).transpose(1, 0, 2)
    defect = np.linalg.norm(a.swapaxes(1, 2) @ a - np.eye(tokens), 2, axis=(1, 2))
    unit = np.finfo(dtype).eps * (1 + cases.nu) * max(1, width / 16)
    exact = oracle.gradients(*args, v_bar)
    return {
        "value": oracle.value_error(y[..., : v.shape[-1]], oracle.attention(*args), v) / (20 * unit),
        "gradient": oracle.gradient_error(gradients, exact, args) / (50 * unit),
        "orthogonality": defect / orthogonality_bound(cases.nu, dtype),
    }


def table(rows: dict[str, np.ndarray]) -> str:
    """Families down, nu across; each entry value / gradient / orthogonality."""
    count = len(oracle.NU)
    lines = ["| family | " + " | ".join(f"nu = {nu:g}" for nu in oracle.NU) + " |"]
    lines.append("|---" * (count + 1) + "|")
    for i, family in enumerate(oracle.FAMILIES):
        cells = [" / ".join(f"{row[i * count + j]:.2g}" for row in rows.values()) for j in range(count)]
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv):
    """Prints one table for each method and dtype."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    jax.config.update("jax_enable_x64", True)
    for method in FLAGS.methods:
        for dtype in map(np.dtype, FLAGS.dtypes):
            worst: dict[str, np.ndarray] = {}
            for width in map(int, FLAGS.widths):
                for tokens in token_counts(width)[-1:] if FLAGS.quick else token_counts(width):
                    for name, errors in measure(method, tokens, width, dtype.type).items():
                        worst[name] = np.maximum(worst.get(name, 0), errors)
            print(f"\n### {method}, {dtype}: " + " / ".join(worst) + ", error over bound\n")
            print(table(worst), flush=True)


if __name__ == "__main__":
    app.run(main)
