"""What a map of attention computes, apart from its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Precision = Literal["ieee", "tf32"]


@dataclass(frozen=True)
class AttentionSpec:
    """The constants of one attention call, shared by its four maps.

    Attributes:
        scale: factor c of the scores ``c · QKᵀ``.
        causal: row ``i`` sees the keys ``0 … i`` (top-left alignment, as in PyTorch). Never together with row ranges.
        precision: how matrix products of float32 operands are evaluated: ``"ieee"`` (as accurate as float32
            arithmetic) or ``"tf32"`` (operands rounded to TF32's 11 bits). Other dtypes ignore it.
        softcap: κ > 0 of the score map φ(x) = κ·tanh(x/κ), applied before any bias; ``None`` for φ(x) = x.
        dropout: probability p, 0 ≤ p < 1, that an entry of the normalised matrix is dropped; the others are
            multiplied by 1/(1 − p).
    """

    scale: float
    causal: bool
    precision: Precision = "ieee"
    softcap: float | None = None
    dropout: float = 0.0


def lse_dtype(q: torch.Tensor) -> torch.dtype:
    """Dtype of the log-sum-exp that F hands to the other maps: float64 for float32 inputs, where less costs accuracy.

    Its rounding scales whole rows of P = exp(s − L). (Apple's GPUs have no float64; there it stays float32.)
    """
    if q.dtype in (torch.float32, torch.float64) and q.device.type != "mps":
        return torch.float64
    return torch.float32
