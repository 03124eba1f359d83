"""Test-wide settings: float64 available, ranks never promoted silently, programs compiled quickly."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Most tests run a large program once.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True)
def optimisations(request):
    """Tests marked `optimized` compile what users run."""
    if request.node.get_closest_marker("optimized") is None:
        yield
        return
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, to look into after they are drawn."""
    from matplotlib.figure import Figure

    saved = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path: (saved.append(self), save(self, path)))
    return saved
