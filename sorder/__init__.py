"""Exact second-order optimisation for PyTorch: curvature of transformers through linear-memory attention kernels."""

from sorder.ops.attention import attention

__version__ = "0.1.0"
__all__ = ["attention"]
