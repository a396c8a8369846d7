"""Optimizers that use exact curvature."""

from sorder.optim.adahessian import AdaHessian, AdaHessianStep
from sorder.optim.gnb import gnb_loss
from sorder.optim.kfac import KFAC
from sorder.optim.kfac_model import KFACStep
from sorder.optim.last_step import NewtonCGStep
from sorder.optim.newton_cg import NewtonCG
from sorder.optim.sophia import SophiaG, SophiaH, SophiaStep

__all__ = [
    "KFAC",
    "AdaHessian",
    "AdaHessianStep",
    "KFACStep",
    "NewtonCG",
    "NewtonCGStep",
    "SophiaG",
    "SophiaH",
    "SophiaStep",
    "gnb_loss",
]
