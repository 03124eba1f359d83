"""Tolerances by dtype and kind of quantity, in one place, and what several test files need."""

import jax.numpy as jnp
import numpy as np

DTYPES = (np.float32, np.float64)


def value_tolerance(dtype, nu=0.0, width=1):
    """Of A V relative to V: no method can do better than a few eps nu (backward error)."""
    return 20 * float(jnp.finfo(dtype).eps) * (1 + nu) * max(1, width / 16)


def gradient_tolerance(dtype, nu=0.0, width=1):
    """Of the cotangents, relative to the largest of the four."""
    return 2.5 * value_tolerance(dtype, nu, width)


def orthogonality_tolerance(dtype, nu):
    """Of ||A^T A - I||."""
    return 1e-5 if dtype == np.float32 and nu <= 100 else value_tolerance(dtype, nu)


def relative_error(got, exact):
    """||got - exact|| / ||exact||, absolute where `exact` is zero."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    return np.linalg.norm(got - exact) / (np.linalg.norm(exact) or 1.0)
