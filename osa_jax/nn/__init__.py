"""Flax layers of the operators; `osa_jax.nn.linen` holds the same layers for Flax Linen."""

from osa_jax.nn.attention import OrthogonalSelfAttention
from osa_jax.nn.conditioning import SpectralConditioned

__all__ = ["OrthogonalSelfAttention", "SpectralConditioned"]
