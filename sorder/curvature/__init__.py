"""Products with the curvature of a plain closure over live parameters."""

from sorder.curvature import diagonal
from sorder.curvature.errors import CurvatureError
from sorder.curvature.point import CurvaturePoint

__all__ = ["CurvatureError", "CurvaturePoint", "diagonal"]
