"""What a map of attention computes, apart from its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["ieee", "tf32"]


@dataclass(frozen=True)
class AttentionSpec:
    """The constants of one attention call, shared by its four maps.

    Attributes:
        scale: factor c of the scores ``c · QKᵀ``.
        causal: row ``i`` sees the keys ``0 … i`` (top-left alignment, as in PyTorch).
        precision: how matrix products of float32 operands are evaluated: ``"ieee"`` (as accurate as float32
            arithmetic) or ``"tf32"`` (operands rounded to TF32's 11 bits). Other dtypes ignore it.
    """

    scale: float
    causal: bool
    precision: Precision = "ieee"
