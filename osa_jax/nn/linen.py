"""Orthogonal self-attention and spectral conditioning for Flax Linen, with the conventions of Flax's own layers.

Shape legend: `N` tokens, `H` heads, `D` head width, `F` features.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.typing import PrecisionLike
from jax.nn.initializers import constant
from jax.typing import DTypeLike

from osa_jax.attention import Method, orthogonal_attention
from osa_jax.coefficients import Coefficients
from osa_jax.conditioning import ConditioningMethod, Layout, spectral_condition
from osa_jax.initializers import Initializer
from osa_jax.nn import common


class OrthogonalSelfAttention(linen.Module):
    """Multi-head orthogonal self-attention, the layer of `osa_jax.nn` for Linen code.

    `sum_h A_h(X) X W^V_h W^O_h` with `A_h = exp(alpha_h / sqrt(D) (Q_h K_h^T - K_h Q_h^T))`. The
    same parameters under the same names give the same numbers as the NNX layer: `query`, `key` and
    `value` with kernels `[F, H, D]`, `out` with kernel `[H, D, F]`, and `alpha` with shape `[H]`,
    `[]` where the heads share it. The projections have no bias unless asked for, as in the paper;
    Flax's own layer has one.

    Dropout acts on the output alone. There is none on the attention matrix: dropping its entries
    would end its orthogonality, which is what the layer is for.

    Args:
      num_heads: the number of heads H.
      dtype: dtype of the computation, by default that of inputs and parameters.
      param_dtype: dtype of the parameters.
      qkv_features: total width of the values, by default the input's features.
      out_features: features of the output, by default the input's.
      qk_features: total width of queries and keys, by default `qkv_features`. It alone sets the
        cost of the exponential, and it may be far smaller.
      alpha: start value of the trainable scale of every head; small means A near the identity.
      share_alpha: whether the heads of a layer share one scale.
      head_init: how value and output kernels start. `joint` slices one Haar draw over the heads,
        so that `sum_h W^V_h W^O_h` has condition number 1 when `qkv_features` is at most the
        features of input and output; `independent` draws per head.
      method: how A is applied, see `osa_jax.orthogonal_attention`.
      num_iters: iterations of `method="newton_schulz"`.
      coefficients: coefficient set of `method="newton_schulz"`.
      dropout_rate: rate of the dropout on the output, in [0, 1); uses the random stream `dropout`.
      deterministic: whether dropout is off; may be given at the call instead.
      precision: precision of the four projections.
      kernel_init: initialiser of all four kernels in place of the paper's; `head_init` is unused
        then.
      use_bias: whether the four projections have a bias.

    Raises:
      ValueError: an argument out of range; at the first call, widths that do not divide over the
        heads, or `2 * qk_features / num_heads` above the features with the paper's initialisation.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> layer = OrthogonalSelfAttention(num_heads=2)
      >>> x = jnp.ones((4, 16, 8))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> layer.apply(variables, x).shape
      (4, 16, 8)

    Zhang & Martens (2026), sections 2 and 4.
    """

    num_heads: int
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    qk_features: int | None = None
    alpha: float = 0.1
    share_alpha: bool = False
    head_init: common.HeadInit = "joint"
    method: Method = "exact"
    num_iters: int | None = None
    coefficients: Coefficients | None = None
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: PrecisionLike = None
    kernel_init: Initializer | None = None
    use_bias: bool = False

    def __post_init__(self) -> None:
        common.check_options(
            num_heads=self.num_heads,
            alpha=self.alpha,
            head_init=self.head_init,
            method=self.method,
            num_iters=self.num_iters,
            coefficients=self.coefficients,
            dropout_rate=self.dropout_rate,
        )
        super().__post_init__()

    @linen.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
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
          is_causal: refused when True.

        Returns:
          Array `[..., N, out_features]`.

        Raises:
          ValueError: cross-attention or causal attention, a mask that is not a boolean `[..., N]`,
            inputs of the wrong shape or dtype, `deterministic` missing, or no stream `dropout`.
        """
        x = common.check_inputs(inputs_q, inputs_k, inputs_v, mask=mask, in_features=None, is_causal=is_causal)
        features = x.shape[-1]
        widths = common.head_widths(
            num_heads=self.num_heads,
            in_features=features,
            qkv_features=self.qkv_features,
            qk_features=self.qk_features,
            kernel_init=self.kernel_init,
        )
        inits = common.kernel_inits(
            # Without the stream no parameter is drawn: Flax only asks for the kernels' shapes.
            self.make_rng("params") if self.has_rng("params") else jax.random.key(0),
            num_heads=self.num_heads,
            head_init=self.head_init,
            kernel_init=self.kernel_init,
        )
        dense = partial(
            linen.DenseGeneral,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
        )
        query_key, value = (self.num_heads, widths.query_key), (self.num_heads, widths.value)
        scales = () if self.share_alpha else (self.num_heads,)
        attended = orthogonal_attention(
            dense(query_key, kernel_init=inits.query, name="query")(x),
            dense(query_key, kernel_init=inits.key, name="key")(x),
            dense(value, kernel_init=inits.value, name="value")(x),
            alpha=self.param("alpha", constant(self.alpha), scales, self.param_dtype),
            mask=mask,
            method=self.method,
            num_iters=self.num_iters,
            coefficients=self.coefficients,
        )
        out_features = features if self.out_features is None else self.out_features
        out = dense(out_features, axis=(-2, -1), kernel_init=inits.out, name="out")
        return self._dropout(out(attended), deterministic)

    def _dropout(self, outputs: jax.Array, deterministic: bool | None) -> jax.Array:
        if self.dropout_rate == 0:
            return outputs
        deterministic = linen.merge_param("deterministic", self.deterministic, deterministic)
        if not deterministic and not self.has_rng("dropout"):
            raise ValueError(
                f"rngs must hold a stream 'dropout' for dropout_rate = {self.dropout_rate}; pass "
                "rngs={'dropout': key}, or deterministic=True."
            )
        return linen.Dropout(self.dropout_rate)(outputs, deterministic=deterministic)


class SpectralConditioned(linen.Module):
    """A module that is called with `W + C` in place of its query, key and value kernels W.

    Trained and stored is W: the parameters are those of the module, under `spectrally_conditioned`,
    and a gradient by them is that by `W + C`. A wrapped module inside the module is refused, and so are
    this one's parameters by `spectral_condition`: nothing is corrected twice.

    Args:
      spectrally_conditioned: any Linen module.
      method: see `osa_jax.spectral_condition`, like all that follows.
      lam: the factor lambda, or one for each projection.
      select: regular expressions that select the kernels.
      heads: the number of heads, for kernels that do not show it.
      layout: `head` or `fused`.

    Raises:
      ValueError: at the first call, as `osa_jax.spectral_condition` for the module's parameters.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen
      >>> layer = SpectralConditioned(linen.MultiHeadDotProductAttention(num_heads=2), method="polar")
      >>> x = jnp.ones((4, 16, 8))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> layer.apply(variables, x).shape
      (4, 16, 8)

    Saratchandran & Lucey (2026), section 3.3.
    """

    spectrally_conditioned: linen.Module
    method: ConditioningMethod = "identity"
    lam: float | Mapping[str, float] = 1.0
    select: str | Mapping[str, str] | None = None
    heads: int | None = None
    layout: Layout = "head"

    @linen.compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; arguments and result are its own."""
        condition = partial(
            spectral_condition,
            method=self.method,
            lam=self.lam,
            select=self.select,
            heads=self.heads,
            layout=self.layout,
        )
        call = linen.map_variables(
            lambda module, *args, **kwargs: module(*args, **kwargs),
            "params",
            trans_in_fn=lambda variables: {"params": condition(variables["params"])},
        )
        if self.is_initializing():  # The mapped parameters cannot be drawn, or they would be stored corrected.
            self.spectrally_conditioned(*args, **kwargs)
        return call(self.spectrally_conditioned, *args, **kwargs)
