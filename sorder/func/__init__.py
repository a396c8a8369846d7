"""Curvature products as pure functions, in the style of ``torch.func``."""

from sorder.func.checkpoint import checkpoint
from sorder.func.fisher import empirical_fvp, fvp
from sorder.func.ggn import ggnvp
from sorder.func.hvp import hvp, value_grad_hvp
from sorder.func.loss_call import LossCall, find_loss_call, match_loss_call
from sorder.func.output_hessian import (
    bce_with_logits_fvp,
    bce_with_logits_hvp,
    cross_entropy_fvp,
    cross_entropy_hvp,
    mse_fvp,
    mse_hvp,
    sample_bce_with_logits_targets,
    sample_cross_entropy_targets,
    sample_mse_targets,
)

__all__ = [
    "LossCall",
    "bce_with_logits_fvp",
    "bce_with_logits_hvp",
    "checkpoint",
    "cross_entropy_fvp",
    "cross_entropy_hvp",
    "empirical_fvp",
    "find_loss_call",
    "fvp",
    "ggnvp",
    "hvp",
    "match_loss_call",
    "mse_fvp",
    "mse_hvp",
    "sample_bce_with_logits_targets",
    "sample_cross_entropy_targets",
    "sample_mse_targets",
    "value_grad_hvp",
]
