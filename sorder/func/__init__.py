"""Curvature products as pure functions, in the style of ``torch.func``."""

from sorder.func.checkpoint import checkpoint
from sorder.func.fisher import empirical_fvp, fvp
from sorder.func.ggn import ggnvp
from sorder.func.hvp import hvp, value_grad_hvp
from sorder.func.output_hessian import bce_with_logits_hvp, cross_entropy_hvp, mse_hvp

__all__ = [
    "bce_with_logits_hvp",
    "checkpoint",
    "cross_entropy_hvp",
    "empirical_fvp",
    "fvp",
    "ggnvp",
    "hvp",
    "mse_hvp",
    "value_grad_hvp",
]
