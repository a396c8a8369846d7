"""Linear algebra on pytrees of tensors, given a product with a matrix."""

from sorder.linalg.cg import CGResult, StopReason, cg
from sorder.linalg.stopping import EisenstatWalker, Record, RelativeProgress, Residual, StoppingRule

__all__ = [
    "CGResult",
    "EisenstatWalker",
    "Record",
    "RelativeProgress",
    "Residual",
    "StopReason",
    "StoppingRule",
    "cg",
]
