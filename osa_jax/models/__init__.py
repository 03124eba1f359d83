"""Architectures by name."""

from osa_jax.models.vit import ViT

MODELS = {"vit": ViT}

__all__ = ["MODELS", "ViT"]
