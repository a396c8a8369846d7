"""Optimizers that use exact curvature."""

from sorder.optim.last_step import NewtonCGStep
from sorder.optim.newton_cg import NewtonCG

__all__ = ["NewtonCG", "NewtonCGStep"]
