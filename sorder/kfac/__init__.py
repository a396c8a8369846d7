"""Kronecker-factored curvature (K-FAC, EKFAC) of plain closures, as a preconditioner."""

from sorder.kfac.preconditioner import KFACPreconditioner

__all__ = ["KFACPreconditioner"]
