"""What the operator's numbers are compared with: float64 NumPy that shares no code with osa_jax.

``A = exp(S)`` from the eigen-decomposition of the Hermitian matrix ``iS = U diag(w) U^H``, and its
adjoint by the Daleckii-Krein formula, ``L(S; E) = U (F o (U^H E U)) U^H`` with the divided
differences ``F_ij = (e^{l_i} - e^{l_j}) / (l_i - l_j)``, ``l = -i w``.

Shapes as in the library: arrays `[N, H, D]`; every head is one case.
"""

from typing import NamedTuple

import numpy as np

NU = (0.0, 1e-3, 1.0, 10.0, 100.0, 1e3, 1e4)
FAMILIES = (
    "generic",
    "K = Q",
    "K = 3 Q",
    "K = Q + 1e-2 noise",
    "K = Q + 1e-4 noise",
    "common mode x 10",
    "common mode x 100",
    "duplicate tokens",
    "dead column",
    "condition 1e3",
    "condition 1e6",
)


class Cases(NamedTuple):
    """One head for each family and each nu: arrays [N, H, D], alpha and nu [H]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    alpha: np.ndarray
    nu: np.ndarray
    names: list[str]


class Gradients(NamedTuple):
    """Cotangents of query, key, value and alpha."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    alpha: np.ndarray


def query_key(rng, family: str, tokens: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Q and K `[N, D]` of one family."""
    q, k = rng.standard_normal((2, tokens, width))
    if family == "K = Q":
        k = q.copy()
    elif family == "K = 3 Q":
        k = 3 * q
    elif family.endswith("noise"):
        k = q + float(family.split()[-2]) * k
    elif family.startswith("common mode"):
        mode = rng.standard_normal((tokens, 1)) * rng.standard_normal((1, width))
        q, k = (x + float(family.split()[-1]) * mode for x in (q, k))
    elif family == "duplicate tokens":
        half = tokens // 2
        q[half : 2 * half], k[half : 2 * half] = q[:half], k[:half]
    elif family == "dead column":
        q[:, 0] = 0
    elif family.startswith("condition"):
        u, s, vt = np.linalg.svd(np.concatenate([q, k], 1), full_matrices=False)
        m = u * np.geomspace(1, 1 / float(family.split()[-1]), len(s)) @ vt
        q, k = np.split(m, 2, axis=1)
    return q, k


def cases(tokens: int, width: int, dtype=np.float64, nus=NU, seed: int = 0) -> Cases:
    """Every family at every nu = alpha / sqrt(D) ||[Q, K]||^2, rounded to `dtype`."""
    rng = np.random.default_rng(seed)
    names, qs, ks, alphas = [], [], [], []
    for family in FAMILIES:
        for nu in nus:
            q, k = query_key(rng, family, tokens, width)
            names.append(f"{family}, nu = {nu:g}")
            qs.append(q)
            ks.append(k)
            alphas.append(nu * np.sqrt(width) / np.linalg.norm(np.concatenate([q, k], 1), 2) ** 2)
    value = rng.standard_normal((tokens, len(names), width))
    arrays = (np.stack(qs, 1), np.stack(ks, 1), value, np.array(alphas))
    rounded = (x.astype(dtype) for x in arrays)
    return Cases(*rounded, nu=np.tile(np.array(nus), len(FAMILIES)), names=names)


def scores(query, key, alpha) -> np.ndarray:
    """S `[H, N, N]` in float64."""
    q, k, alpha = (np.asarray(x, np.float64) for x in (query, key, alpha))
    s = np.einsum("nhd,mhd->hnm", q, k)
    return (s - s.swapaxes(1, 2)) * np.reshape(alpha / np.sqrt(q.shape[-1]), (-1, 1, 1))


def rotation(query, key, alpha) -> np.ndarray:
    """A = exp(S) `[H, N, N]`."""
    w, u = np.linalg.eigh(1j * scores(query, key, alpha))
    return ((u * np.exp(-1j * w)[:, None, :]) @ u.conj().swapaxes(1, 2)).real


def attention(query, key, value, alpha) -> np.ndarray:
    """A V `[N, H, E]`."""
    return np.einsum("hnm,mhe->nhe", rotation(query, key, alpha), np.asarray(value, np.float64))


def gradients(query, key, value, alpha, cotangent) -> Gradients:
    """The adjoint of `attention` applied to a cotangent `[N, H, E]`; alpha must be `[H]`."""
    q, k, v, alpha, y_bar = (np.asarray(x, np.float64) for x in (query, key, value, alpha, cotangent))
    c = alpha / np.sqrt(q.shape[-1])
    w, u = np.linalg.eigh(1j * scores(q, k, alpha))
    uh = u.conj().swapaxes(1, 2)
    mean, half = (w[:, :, None] + w[:, None, :]) / 2, (w[:, :, None] - w[:, None, :]) / 2
    divided = np.exp(-1j * mean) * np.sinc(half / np.pi)
    a_bar = np.einsum("nhe,mhe->hnm", y_bar, v)
    s_bar = (u @ (divided.conj() * (uh @ a_bar @ u)) @ uh).real
    skew = s_bar - s_bar.swapaxes(1, 2)
    return Gradients(
        query=np.einsum("hnm,mhd->nhd", skew, k) * c[:, None],
        key=-np.einsum("hnm,mhd->nhd", skew, q) * c[:, None],
        value=np.einsum("hmn,mhe->nhe", rotation(q, k, alpha), y_bar),
        alpha=np.einsum("hnm,hnm->h", s_bar, scores(q, k, np.ones_like(alpha))),
    )


def norm(x: np.ndarray) -> np.ndarray:
    """The 2-norm of each head of `[N, H, D]`, or |x| of `[H]`."""
    return np.abs(x) if x.ndim == 1 else np.sqrt(np.sum(np.asarray(x, np.float64) ** 2, (0, 2)))


def value_error(got, exact, value) -> np.ndarray:
    """||got - exact|| / ||V|| by head."""
    return norm(np.asarray(got, np.float64) - exact) / norm(value)


def gradient_error(got, exact: Gradients, arguments) -> np.ndarray:
    """The largest error of the four, each gradient taken with respect to the relative size of its argument
    (``||x|| ||x_bar||``), relative to the largest of the four; by head."""
    sizes = [norm(np.asarray(x, np.float64)) for x in arguments]
    scale = np.max([size * norm(bar) for size, bar in zip(sizes, exact, strict=True)], 0)
    errors = [
        size * norm(np.asarray(bar, np.float64) - true) for size, bar, true in zip(sizes, got, exact, strict=True)
    ]
    return np.max(errors, 0) / np.where(scale > 0, scale, 1)
