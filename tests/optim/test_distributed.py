"""Two processes with half a batch each take the step of one process with all of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sorder.optim import NewtonCG

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "hessian": {"curvature": "hessian"},
    "diagonal": {"preconditioner": "diagonal"},
    "trust region": {"damping_update": "trust-region"},
}
STEPS = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def train(share: slice, options: dict[str, Any], parallel: bool = False, **more: Any) -> tuple[Tensor, list[float]]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(64, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (64,), generator=generator)
    net = model()
    called = DistributedDataParallel(net) if parallel else net
    optimizer = NewtonCG(called.parameters(), **options, **more)
    losses = []
    for _ in range(STEPS):
        optimizer.step(lambda: F.cross_entropy(called(x[share]), y[share]))
        losses.append(optimizer.last_step.loss)
    return torch.cat([p.detach().flatten() for p in net.parameters()]), losses


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    share = slice(0, 32) if rank == 0 else slice(32, 64)
    results = {name: train(share, o, process_group=dist.group.WORLD) for name, o in OPTIONS.items()}
    results["ddp"] = train(share, {}, parallel=True)
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or os.name == "nt", reason="needs torch.distributed")
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    mp.spawn(worker, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for name, (got, losses) in first.items():
        assert torch.equal(got, second[name][0]), f"{name}: ranks differ"
        want, want_losses = train(slice(0, 64), OPTIONS.get(name, {}))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(losses, want_losses, rtol=1e-10, atol=1e-10)
