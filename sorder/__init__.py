"""Exact second-order optimisation for PyTorch: curvature of transformers through linear-memory attention kernels."""

from sorder import curvature, func, linalg
from sorder.kfac import KFACPreconditioner
from sorder.ops.attention import attention
from sorder.ops.mask import Mask
from sorder.ops.routing import exact_attention
from sorder.ops.varlen import attention_varlen
from sorder.optim import KFAC, AdaHessian, NewtonCG, SophiaG, SophiaH, gnb_loss

__version__ = "0.1.0"
__all__ = [
    "KFAC",
    "AdaHessian",
    "KFACPreconditioner",
    "Mask",
    "NewtonCG",
    "SophiaG",
    "SophiaH",
    "attention",
    "attention_varlen",
    "curvature",
    "exact_attention",
    "func",
    "gnb_loss",
    "linalg",
]
