"""Orthogonal self-attention as a Flax NNX layer, with the conventions of `nnx.MultiHeadAttention`.

Shape legend: `N` tokens, `H` heads, `D` head width, `F` features.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import PrecisionLike
from jax.typing import DTypeLike

from osa_jax.attention import Method, orthogonal_attention
from osa_jax.coefficients import Coefficients
from osa_jax.initializers import Initializer
from osa_jax.nn import common


class OrthogonalSelfAttention(nnx.Module):
    """Multi-head orthogonal self-attention.

    `sum_h A_h(X) X W^V_h W^O_h` with `A_h = exp(alpha_h / sqrt(D) (Q_h K_h^T - K_h Q_h^T))`, and no
    softmax anywhere. Parameters are `query`, `key` and `value` with kernels `[F, H, D]`, `out` with
    kernel `[H, D, F]`, and `alpha` with shape `[H]`, `[]` where the heads share it. The
    projections have no bias unless asked for, as in the paper; Flax's own layer has one.

    Dropout acts on the output alone. There is none on the attention matrix: dropping its entries
    would end its orthogonality, which is what the layer is for.

    Args:
      num_heads: the number of heads H.
      in_features: features F of the input.
      qkv_features: total width of the values, by default `in_features`; a head's is
        `qkv_features / num_heads`.
      out_features: features of the output, by default `in_features`.
      qk_features: total width of queries and keys, by default `qkv_features`. It alone sets the
        cost of the exponential, and it may be far smaller.
      alpha: start value of the trainable scale of every head; small means A near the identity.
      share_alpha: whether the heads of a layer share one scale.
      head_init: how value and output kernels start. `joint` slices one Haar draw over the heads, so
        that `sum_h W^V_h W^O_h` has condition number 1 when `qkv_features` is at most `in_features`
        and `out_features`; `independent` draws per head.
      method: how A is applied, see `osa_jax.orthogonal_attention`.
      num_iters: iterations of `method="newton_schulz"`.
      coefficients: coefficient set of `method="newton_schulz"`.
      dtype: dtype of the computation, by default that of inputs and parameters.
      param_dtype: dtype of the parameters.
      dropout_rate: rate of the dropout on the output, in [0, 1).
      deterministic: whether dropout is off; may be given at the call instead.
      precision: precision of the four projections.
      kernel_init: initialiser of all four kernels in place of the paper's; `head_init` is unused
        then.
      use_bias: whether the four projections have a bias.
      rngs: random streams: `params`, and `dropout` when `dropout_rate` is above 0.

    Raises:
      ValueError: an argument out of range, widths that do not divide over the heads, or
        `2 * qk_features / num_heads > in_features` with the paper's initialisation.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = OrthogonalSelfAttention(num_heads=2, in_features=8, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((4, 16, 8))).shape
      (4, 16, 8)
      >>> layer.query.kernel.shape, layer.out.kernel.shape, layer.alpha.shape
      ((8, 2, 4), (2, 4, 8), (2,))

    Zhang & Martens (2026), sections 2 and 4.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        *,
        qk_features: int | None = None,
        alpha: float = 0.1,
        share_alpha: bool = False,
        head_init: common.HeadInit = "joint",
        method: Method = "exact",
        num_iters: int | None = None,
        coefficients: Coefficients | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: PrecisionLike = None,
        kernel_init: Initializer | None = None,
        use_bias: bool = False,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        common.check_options(
            num_heads=num_heads,
            alpha=alpha,
            head_init=head_init,
            method=method,
            num_iters=num_iters,
            coefficients=coefficients,
            dropout_rate=dropout_rate,
        )
        rngs = common.check_rngs(rngs, dropout_rate)
        widths = common.head_widths(
            num_heads=num_heads,
            in_features=in_features,
            qkv_features=qkv_features,
            qk_features=qk_features,
            kernel_init=kernel_init,
        )
        self.num_heads = num_heads
        self.in_features = in_features
        self.method = method
        self.num_iters = num_iters
        self.coefficients = coefficients

        inits = common.kernel_inits(rngs.params(), num_heads=num_heads, head_init=head_init, kernel_init=kernel_init)
        linear = partial(
            nnx.LinearGeneral,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            rngs=rngs,
        )
        query_key, value = (num_heads, widths.query_key), (num_heads, widths.value)
        self.query = linear(in_features, query_key, kernel_init=inits.query)
        self.key = linear(in_features, query_key, kernel_init=inits.key)
        self.value = linear(in_features, value, kernel_init=inits.value)
        self.out = linear(
            value,
            in_features if out_features is None else out_features,
            axis=(-2, -1),
            kernel_init=inits.out,
        )
        self.alpha = nnx.Param(jnp.full(() if share_alpha else (num_heads,), alpha, param_dtype))
        drops = dropout_rate > 0
        self.dropout = nnx.Dropout(
            dropout_rate,
            deterministic=deterministic if drops else True,
            rngs=rngs if drops else None,
        )

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        is_causal: bool = False,
    ) -> jax.Array:
        """Attend from every valid token to every valid token.

        Args:
          inputs_q: tokens `[..., N, F]`, a real floating dtype.
          inputs_k: refused, like `inputs_v`, unless it is `inputs_q` itself; there for calls
            written for Flax's layer.
          inputs_v: see `inputs_k`.
          mask: boolean `[..., N]`, True for valid tokens. The others are read as zeros, whatever
            they hold, so their output is zero (or what the biases make of it).
          deterministic: switches dropout off; needed, here or at construction, with dropout.
          rngs: random streams for dropout in place of the layer's own.
          is_causal: refused when True.

        Returns:
          Array `[..., N, out_features]`.

        Raises:
          ValueError: cross-attention or causal attention, a mask that is not a boolean `[..., N]`,
            inputs of the wrong shape or dtype, or `deterministic` missing.
        """
        x = common.check_inputs(
            inputs_q,
            inputs_k,
            inputs_v,
            mask=mask,
            in_features=self.in_features,
            is_causal=is_causal,
        )
        attended = orthogonal_attention(
            self.query(x),
            self.key(x),
            self.value(x),
            alpha=self.alpha[...],
            mask=mask,
            method=self.method,
            num_iters=self.num_iters,
            coefficients=self.coefficients,
        )
        return self.dropout(self.out(attended), deterministic=deterministic, rngs=rngs)
