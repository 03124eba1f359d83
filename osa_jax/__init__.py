"""Orthogonal self-attention and the conditioning of attention, for JAX.

The functions here need JAX alone. Flax layers are in `osa_jax.nn`, models in `osa_jax.models`, the training loop in
`osa_jax.training`; importing `osa_jax` imports none of them.
"""

from osa_jax.attention import orthogonal_attention, orthogonal_attention_weights
from osa_jax.autodiff import custom_vjp
from osa_jax.bases import newton_schulz_basis, newton_schulz_polynomial, qr_basis
from osa_jax.conditioning import spectral_condition, vanished_gradients
from osa_jax.expm import expm_skew, expm_skew_frechet, phi_skew, phi_skew_frechet
from osa_jax.initializers import query_key_stiefel, scaled_uniform_orthogonal, stiefel
from osa_jax.jacobian import (
    SpectrumEstimate,
    attention_jacobian,
    condition_number,
    jacobian_spectrum,
    singular_values,
)
from osa_jax.skew import gram, skew_form, skew_scores, symplectic_form
from osa_jax.theory import (
    AttentionDerivatives,
    orthogonality_bound,
    osa_condition_bound,
    osa_slope,
    softmax_attention_derivatives,
    softmax_condition_bound,
    spectral_conditioning_bound,
)

__version__ = "0.1.0"

__all__ = [
    "AttentionDerivatives",
    "SpectrumEstimate",
    "attention_jacobian",
    "condition_number",
    "custom_vjp",
    "expm_skew",
    "expm_skew_frechet",
    "gram",
    "jacobian_spectrum",
    "newton_schulz_basis",
    "newton_schulz_polynomial",
    "orthogonal_attention",
    "orthogonal_attention_weights",
    "orthogonality_bound",
    "osa_condition_bound",
    "osa_slope",
    "phi_skew",
    "phi_skew_frechet",
    "qr_basis",
    "query_key_stiefel",
    "scaled_uniform_orthogonal",
    "singular_values",
    "skew_form",
    "skew_scores",
    "softmax_attention_derivatives",
    "softmax_condition_bound",
    "spectral_condition",
    "spectral_conditioning_bound",
    "stiefel",
    "symplectic_form",
    "vanished_gradients",
]
