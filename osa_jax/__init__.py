"""Orthogonal self-attention and the conditioning of attention, for JAX.

The functions here need JAX alone. Flax layers are in `osa_jax.nn`, models in `osa_jax.models`, the training loop in
`osa_jax.training`; importing `osa_jax` imports none of them.
"""

from osa_jax.attention import orthogonal_attention, orthogonal_attention_weights
from osa_jax.autodiff import custom_vjp
from osa_jax.bases import newton_schulz_basis, newton_schulz_polynomial, qr_basis
from osa_jax.expm import expm_skew, expm_skew_frechet, phi_skew, phi_skew_frechet
from osa_jax.initializers import query_key_stiefel, scaled_uniform_orthogonal, stiefel
from osa_jax.skew import gram, skew_form, skew_scores, symplectic_form

__version__ = "0.1.0"

__all__ = [
    "custom_vjp",
    "expm_skew",
    "expm_skew_frechet",
    "gram",
    "newton_schulz_basis",
    "newton_schulz_polynomial",
    "orthogonal_attention",
    "orthogonal_attention_weights",
    "phi_skew",
    "phi_skew_frechet",
    "qr_basis",
    "query_key_stiefel",
    "scaled_uniform_orthogonal",
    "skew_form",
    "skew_scores",
    "stiefel",
    "symplectic_form",
]
