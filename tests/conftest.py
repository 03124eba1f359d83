"""Test-wide settings: float64 available, ranks never promoted silently, programs compiled quickly."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def compile_quickly(request):
    """Most tests run a large program once; those marked `optimized` run what users run."""
    jax.config.update("jax_disable_most_optimizations", request.node.get_closest_marker("optimized") is None)
