"""Exact second-order optimisation for PyTorch: curvature of transformers through linear-memory attention kernels.

- Attention: :func:`attention`, :func:`attention_varlen`, :class:`Mask`; :class:`exact_attention` for models that use
  ``F.scaled_dot_product_attention``; ``sorder.integrations.huggingface.register()``.
- Curvature products: ``sorder.func`` (``hvp``, ``ggnvp``, ``fvp``, ``checkpoint`` and more, pure functions) and
  ``sorder.curvature`` (``CurvaturePoint`` of a closure; ``diagonal``: estimators). ``sorder.linalg.cg`` solves.
- Optimizers: :class:`NewtonCG`, :class:`KFAC` and :class:`KFACPreconditioner`, :class:`SophiaH`, :class:`SophiaG` with
  :func:`gnb_loss`, :class:`AdaHessian`. What their ``last_step`` holds is in ``sorder.optim`` (``NewtonCGStep``, …).
"""

from sorder import curvature, func, integrations, linalg, optim
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
    "integrations",
    "linalg",
    "optim",
]
