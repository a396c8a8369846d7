"""Averages over the ranks of data-parallel training: the one place where an optimizer communicates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor


class Reduction:
    """Means over a process group; the identity where there is none.

    Every rank must call the methods in the same order. The results are the same bits on every rank, so that decisions
    taken from them agree.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Mean of each tensor over the ranks; one message per dtype and device."""
        if self.size == 1:
            return list(tensors)
        out: dict[int, Tensor] = {}
        order = sorted(range(len(tensors)), key=lambda i: _bucket(tensors[i]))
        for _, members in groupby(order, key=lambda i: _bucket(tensors[i])):
            numbers = list(members)
            flat = torch.cat([tensors[i].reshape(-1) for i in numbers])
            dist.all_reduce(flat, group=self.group)
            parts = flat.div_(self.size).split([tensors[i].numel() for i in numbers])
            out |= {i: part.view_as(tensors[i]) for i, part in zip(numbers, parts, strict=True)}
        return [out[i] for i in range(len(tensors))]

    def mean_scalar(self, value: Tensor) -> float:
        """Mean of a 0-dimensional tensor over the ranks, on the host."""
        if self.size == 1:
            return value.item()
        dtype = torch.float32 if value.device.type == "mps" else torch.float64
        return self.mean([value.detach().to(dtype)])[0].item()


def _bucket(t: Tensor) -> tuple[str, str]:
    return str(t.device), str(t.dtype)
