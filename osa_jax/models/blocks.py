"""The parts of a vision transformer around its attention: patches, MLP, block.

Shape legend: `B` batch, `N` tokens, `F` width, `[B, H, W, C]` images.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from osa_jax.initializers import Initializer, scaled_uniform_orthogonal
from osa_jax.models.activations import Activation
from osa_jax.nn import OrthogonalSelfAttention

SelfAttention = nnx.MultiHeadAttention | OrthogonalSelfAttention


class PatchEmbedding(nnx.Module):
    """Images `[B, H, W, C]` to tokens `[B, N, F]`: patches, linear map, positions, class token.

    With `orthogonal`, patches and positions each give half of a token's mean square: standardised
    images become tokens of unit scale, distinct even where the patches are not.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        patch_size: int,
        width: int,
        *,
        class_token: bool,
        orthogonal: bool,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        height, breadth, channels = image_shape
        self.patch_size = patch_size
        self.patches = nnx.Linear(
            patch_size**2 * channels,
            width,
            kernel_init=_half_suo if orthogonal else nnx.initializers.lecun_normal(),
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        vectors = nnx.initializers.normal(math.sqrt(0.5) if orthogonal else 0.02)
        num_tokens = (height // patch_size) * (breadth // patch_size) + class_token
        self.positions = nnx.Param(vectors(rngs.params(), (num_tokens, width), param_dtype))
        self.class_token = nnx.Param(vectors(rngs.params(), (1, width), param_dtype)) if class_token else None

    def __call__(self, images: jax.Array) -> jax.Array:
        """Embed the patches, row by row; the class token comes first."""
        batch, height, breadth, channels = images.shape
        p = self.patch_size
        rows, columns = height // p, breadth // p
        grid = images.reshape(batch, rows, p, columns, p, channels).swapaxes(2, 3)
        tokens = self.patches(grid.reshape(batch, rows * columns, p * p * channels))
        if self.class_token is not None:
            token = self.class_token[...].astype(tokens.dtype)[None]
            tokens = jnp.concatenate([jnp.repeat(token, batch, axis=0), tokens], axis=1)
        return tokens + self.positions[...].astype(tokens.dtype)[None]


class MLP(nnx.Module):
    """Two linear maps around an activation, `f(x W_1 + b_1) W_2 + b_2`."""

    def __init__(
        self,
        width: int,
        hidden_width: int,
        *,
        activation: Activation,
        kernel_init: Initializer,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        options: dict[str, Any] = {
            "kernel_init": kernel_init,
            "dtype": dtype,
            "param_dtype": param_dtype,
        }
        self.activate = activation
        self.hidden = nnx.Linear(width, hidden_width, rngs=rngs, **options)
        self.out = nnx.Linear(hidden_width, width, rngs=rngs, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply to the last axis."""
        return self.out(self.activate(self.hidden(x)))


class Block(nnx.Module):
    """Attention and MLP, each with its own optional norm before, dropout after, and skip around."""

    def __init__(
        self,
        attention: SelfAttention,
        mlp: MLP,
        *,
        width: int,
        skip: bool,
        norm: bool,
        dropout_rate: float,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.attention = attention
        self.mlp = mlp
        self.skip = skip
        self.attention_norm = nnx.LayerNorm(width, **options) if norm else None
        self.mlp_norm = nnx.LayerNorm(width, **options) if norm else None
        drops = dropout_rate > 0
        self.dropout = nnx.Dropout(dropout_rate, deterministic=None if drops else True, rngs=rngs if drops else None)

    def __call__(self, x: jax.Array, *, deterministic: bool | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The block's output and everything it computed on the way, by name."""

        def leave(branch: jax.Array, entered: jax.Array) -> jax.Array:
            dropped = self.dropout(branch, deterministic=deterministic)
            return entered + dropped if self.skip else dropped

        out = {}
        out["attention_input"] = self.attention_norm(x) if self.attention_norm else x
        out["attention"] = self.attention(out["attention_input"])
        out["attended"] = leave(out["attention"], x)
        out["mlp_input"] = self.mlp_norm(out["attended"]) if self.mlp_norm else out["attended"]
        out["preactivation"] = self.mlp.hidden(out["mlp_input"])
        out["hidden"] = self.mlp.activate(out["preactivation"])
        out["mlp"] = self.mlp.out(out["hidden"])
        out["output"] = leave(out["mlp"], out["attended"])
        return out["output"], out


def _half_suo(key: jax.Array, shape: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    """A scaled uniform orthogonal kernel that halves the mean square."""
    return scaled_uniform_orthogonal()(key, shape, dtype) * math.sqrt(0.5)
