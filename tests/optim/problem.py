"""A small classification problem in float64, the same at every call."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def data(seed: int = 1, rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def closure_of(net: nn.Module, seed: int = 1) -> Callable[[], Tensor]:
    x, y = data(seed)
    return lambda: F.cross_entropy(net(x), y)


def values(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])
