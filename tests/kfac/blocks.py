"""Blocks of a dense curvature matrix in the coordinates of K-FAC's blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sorder.kfac import KFACPreconditioner
from sorder.kfac.kronecker import dense_block


def coordinates(kfac: KFACPreconditioner, number: int) -> Tensor:
    """Where the block's entries lie in the flattened parameters."""
    numbers, offset = [], 0
    for p in kfac.params:
        numbers.append(torch.arange(offset, offset + p.numel(), dtype=torch.float64).view_as(p))
        offset += p.numel()
    return kfac.factors.blocks[number].gather(numbers, torch.float64).flatten().long()


def block_of(dense: Tensor, kfac: KFACPreconditioner, number: int) -> Tensor:
    """Block ``number`` of a dense matrix over all parameters."""
    index = coordinates(kfac, number)
    return dense[index][:, index]


def estimated(kfac: KFACPreconditioner) -> list[Tensor]:
    """Every block as K-FAC has it."""
    return [dense_block(kfac.factors, number) for number in range(len(kfac.factors.blocks))]


def multiply(kfac: KFACPreconditioner, v: Sequence[Tensor]) -> list[Tensor]:
    """K times ``v``, with blocks alone."""
    out = [torch.zeros_like(t) for t in v]
    for block, dense in zip(kfac.factors.blocks, estimated(kfac), strict=True):
        x = block.gather(v, torch.float64)
        block.scatter((dense @ x.flatten()).view_as(x), out)
    return out
