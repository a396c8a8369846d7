"""Exact second-order optimisation for PyTorch: curvature of transformers through linear-memory attention kernels."""

from sorder import curvature, func, linalg
from sorder.kfac import KFACPreconditioner
from sorder.ops.attention import attention
from sorder.ops.routing import exact_attention
from sorder.optim import KFAC, AdaHessian, NewtonCG, SophiaG, SophiaH, gnb_loss

__version__ = "0.1.0"
__all__ = [
    "KFAC",
    "AdaHessian",
    "KFACPreconditioner",
    "NewtonCG",
    "SophiaG",
    "SophiaH",
    "attention",
    "curvature",
    "exact_attention",
    "func",
    "gnb_loss",
    "linalg",
]
