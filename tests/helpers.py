"""Tolerances by dtype and kind of quantity, in one place, and what several test files need."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parents[1]

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


def run_python(code, *options, devices=1):
    """Run `code` in an interpreter of its own, with so many simulated CPU devices."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, *options, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
