"""A vision transformer whose switches give every system of the paper, and what they are compared with.

Shape legend: `B` batch, `N` tokens, `F` width, `[B, H, W, C]` images.
"""

from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from osa_jax.attention import Method
from osa_jax.coefficients import Coefficients
from osa_jax.initializers import scaled_uniform_orthogonal
from osa_jax.models.activations import Shaping, make_activation
from osa_jax.models.attention import Init, Softmax, softmax_attention
from osa_jax.models.blocks import MLP, Block, PatchEmbedding, SelfAttention
from osa_jax.nn import OrthogonalSelfAttention
from osa_jax.nn.common import HeadInit, check_dropout_rate, check_rngs

Attention = Literal["orthogonal", Softmax]
Pooling = Literal["mean", "cls"]


class ViT(nnx.Module):
    """Vision transformer with softmax or orthogonal attention, with or without skips and norms.

    `X_0 = patches W + positions`, then per block `X <- MLP(MOSA(X))` with neither skip nor norm, or
    `X <- X + f(LN(X))` for `f` attention and MLP with both, and a linear classifier of the pooled
    tokens that starts at zero.

    `init="standard"` is the usual ViT's: Xavier-uniform kernels, LeCun-normal patch embedding and
    positions of standard deviation 0.02. `init="orthogonal"` is the paper's: joint Stiefel queries
    and keys, Stiefel values and outputs, scaled uniform orthogonal MLP. Its patch embedding and its
    positions each give half of a token's mean square, so that images of zero mean and unit variance
    become tokens of unit scale, distinct where the patches are not. `init="cutting_the_skip"` is
    that paper's start for softmax attention, see `osa_jax.models.attention`, with scaled uniform
    orthogonal MLP and the usual embedding. Biases are zero in all.

    Dropout acts on the outputs of attention and MLP alone; on the attention matrix it would end its
    orthogonality.

    Args:
      image_shape: height, width and channels of the images.
      num_classes: number of logits.
      patch_size: side of the square patches; it has to divide height and width.
      width: features F of a token.
      depth: number of blocks.
      num_heads: attention heads.
      qk_features: total width of queries and keys, by default `width`; orthogonal attention only.
      mlp_ratio: hidden width of the MLP over `width`.
      attention: `orthogonal`, `softmax`, which is `nnx.MultiHeadAttention`, or a variant of it:
        `value_skipinit`, `shaped`, `e_spa` or `ns_attention`, see `osa_jax.models.attention`.
      method: how orthogonal attention is applied, see `osa_jax.orthogonal_attention`.
      num_iters: iterations of `method="newton_schulz"`.
      coefficients: coefficient set of `method="newton_schulz"`.
      skip: whether a block adds its input to the outputs of attention and MLP.
      norm: whether there are layer norms, before attention and MLP and after the last block.
      init: `standard`, `orthogonal` or `cutting_the_skip`.
      head_init: `joint` or `independent` value and output kernels of the orthogonal initialisation.
      alpha: start value of orthogonal attention's scale.
      share_alpha: whether the heads of a layer share one scale.
      activation: `gelu`, `relu`, `silu` or `tanh`.
      activation_gain: factor on the activation, `preserve` for the one that keeps the mean square
        of a standard normal input.
      activation_shaping: `none`, or `dks` or `tat` for an activation shaped for the depth, see
        `osa_jax.models.activations.make_activation`.
      pooling: `mean` over the tokens, or `cls` for a class token.
      dropout_rate: rate of the dropout on outputs, in [0, 1).
      dtype: dtype of the computation, by default that of images and parameters.
      param_dtype: dtype of the parameters.
      rngs: random streams: `params`, and `dropout` when `dropout_rate` is above 0.

    Raises:
      ValueError: an unknown choice, a number out of range, or sizes that do not divide.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> model = ViT(image_shape=(8, 8, 1), num_classes=10, patch_size=2, width=16, depth=2,
      ...             num_heads=2, attention="orthogonal", skip=False, norm=False,
      ...             init="orthogonal", activation_gain="preserve", rngs=nnx.Rngs(0))
      >>> logits, out = model(jnp.ones((3, 8, 8, 1)), return_intermediates=True)
      >>> logits.shape, out["block_1/attention"].shape
      ((3, 10), (3, 16, 16))

    Zhang & Martens (2026), sections 4 and 5; Dosovitskiy et al. (2020).
    """

    def __init__(
        self,
        *,
        image_shape: tuple[int, int, int],
        num_classes: int,
        patch_size: int,
        width: int,
        depth: int,
        num_heads: int,
        qk_features: int | None = None,
        mlp_ratio: float = 4,
        attention: Attention = "softmax",
        method: Method = "exact",
        num_iters: int | None = None,
        coefficients: Coefficients | None = None,
        skip: bool,
        norm: bool,
        init: Init = "standard",
        head_init: HeadInit = "joint",
        alpha: float = 0.1,
        share_alpha: bool = False,
        activation: str = "gelu",
        activation_gain: float | Literal["preserve"] = 1.0,
        activation_shaping: Shaping = "none",
        pooling: Pooling = "mean",
        dropout_rate: float = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        _check_choices(
            attention=(attention, get_args(Attention)),
            init=(init, get_args(Init)),
            head_init=(head_init, get_args(HeadInit)),
            pooling=(pooling, get_args(Pooling)),
        )
        _check_sizes(image_shape, patch_size, width, depth, num_heads, num_classes, mlp_ratio)
        check_dropout_rate(dropout_rate)
        check_rngs(rngs, dropout_rate)
        _check_attention(attention, init, qk_features)
        height, breadth, channels = image_shape
        self.image_shape = (height, breadth, channels)
        self.pooling = pooling

        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        xavier = nnx.initializers.xavier_uniform()

        def attend(layer: int) -> SelfAttention:
            if attention != "orthogonal":
                return softmax_attention(
                    attention,
                    num_heads,
                    width,
                    layer=layer,
                    depth=depth,
                    init=init,
                    head_init=head_init,
                    **options,
                )
            return OrthogonalSelfAttention(
                num_heads,
                width,
                qk_features=qk_features,
                alpha=alpha,
                share_alpha=share_alpha,
                head_init=head_init,
                method=method,
                num_iters=num_iters,
                coefficients=coefficients,
                kernel_init=None if init == "orthogonal" else xavier,
                **options,
            )

        mlp = partial(
            MLP,
            width,
            int(mlp_ratio * width),
            activation=make_activation(activation, gain=activation_gain, shaping=activation_shaping, depth=depth),
            kernel_init=xavier if init == "standard" else scaled_uniform_orthogonal(),
        )
        block = partial(Block, width=width, skip=skip, norm=norm, dropout_rate=dropout_rate)

        self.embed = PatchEmbedding(
            self.image_shape,
            patch_size,
            width,
            class_token=pooling == "cls",
            orthogonal=init == "orthogonal",
            **options,
        )
        self.blocks = nnx.List([block(attend(layer), mlp(**options), **options) for layer in range(1, depth + 1)])
        self.norm = nnx.LayerNorm(width, **options) if norm else None
        self.head = nnx.Linear(width, num_classes, kernel_init=nnx.initializers.zeros, **options)

    def __call__(
        self,
        images: jax.Array,
        *,
        deterministic: bool | None = None,
        return_intermediates: bool = False,
    ) -> jax.Array | tuple[jax.Array, dict[str, jax.Array]]:
        """Classify a batch of images.

        Args:
          images: `[B, H, W, C]`, a real floating dtype, standardised.
          deterministic: switches dropout off; needed with `dropout_rate` above 0 unless
            `model.train()` or `model.eval()` was called.
          return_intermediates: whether to return every intermediate value too.

        Returns:
          Logits `[B, num_classes]`; with `return_intermediates` also a dict of arrays: `tokens`,
          `block_i/...` with `attention_input`, `attention`, `attended`, `mlp_input`,
          `preactivation`, `hidden`, `mlp` and `output` of every block i, then `encoded`, `pooled`
          and `logits`. Values of attention and MLP are those before dropout.

        Raises:
          ValueError: images of another shape or of an integer dtype, or `deterministic` missing.
        """
        if images.shape[1:] != self.image_shape or not jnp.issubdtype(images.dtype, jnp.floating):
            height, width, channels = self.image_shape
            raise ValueError(
                f"images must be floating point of shape [B, {height}, {width}, {channels}], got "
                f"{images.dtype} {images.shape}; standardise them first."
            )
        out = {"tokens": self.embed(images)}
        x = out["tokens"]
        for index, block in enumerate(self.blocks):
            x, values = block(x, deterministic=deterministic)
            out |= {f"block_{index}/{name}": value for name, value in values.items()}
        out["encoded"] = self.norm(x) if self.norm else x
        out["pooled"] = out["encoded"][:, 0] if self.pooling == "cls" else out["encoded"].mean(1)
        out["logits"] = self.head(out["pooled"])
        return (out["logits"], out) if return_intermediates else out["logits"]


def _check_choices(**choices: tuple[str, tuple[str, ...]]) -> None:
    for name, (choice, allowed) in choices.items():
        if choice not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {choice!r}.")


def _check_attention(attention: Attention, init: Init, qk_features: int | None) -> None:
    """What softmax attention alone has, and what orthogonal attention alone has."""
    if attention != "orthogonal" and qk_features is not None:
        raise ValueError(
            f"qk_features must be None with attention={attention!r}, got {qk_features}; Flax's "
            "layer has one width for queries, keys and values."
        )
    if attention == "orthogonal" and init == "cutting_the_skip":
        raise ValueError(
            "init must be 'standard' or 'orthogonal' with attention='orthogonal', got 'cutting_the_skip'; it is a "
            "start of softmax attention."
        )


def _check_sizes(
    image_shape: tuple[int, int, int],
    patch_size: int,
    width: int,
    depth: int,
    num_heads: int,
    num_classes: int,
    mlp_ratio: float,
) -> None:
    """Sizes are positive, the patches tile the image, the heads split the width."""
    sizes = {
        "patch_size": patch_size,
        "width": width,
        "depth": depth,
        "num_heads": num_heads,
        "num_classes": num_classes,
        "int(mlp_ratio * width)": int(mlp_ratio * width),
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")
    if len(image_shape) != 3 or any(size < 1 for size in image_shape):
        raise ValueError(f"image_shape must be (height, width, channels), got {image_shape}.")
    height, breadth, _ = image_shape
    if height % patch_size or breadth % patch_size:
        raise ValueError(
            f"patch_size must divide the image, got {patch_size} for {height} x {breadth}; take a "
            "common divisor of the sides, or pad the images."
        )
    if width % num_heads:
        raise ValueError(f"num_heads must divide width, got {num_heads} and {width}.")
