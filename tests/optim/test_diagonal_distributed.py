"""The diagonal family: two processes with half a batch each take the steps of one process with all of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sorder.optim import AdaHessian, SophiaG, SophiaH
from tests.optim.problem import data, model, values

MAKERS: dict[str, Any] = {"SophiaH": SophiaH, "SophiaG": SophiaG, "AdaHessian": AdaHessian}


def train(name: str, share: slice, parallel: bool, plain: bool) -> Tensor:
    """Four steps; the labels of the Gauss–Newton–Bartlett estimate are given, so that the split cannot change them."""
    x, y = (t[share] for t in data())
    net = model()
    called = DistributedDataParallel(net) if parallel else net
    optimizer = MAKERS[name](called.parameters(), lr=0.02, update_interval=2)

    def closure() -> Tensor:
        return F.cross_entropy(called(x), y)

    def counted() -> tuple[Tensor, int]:
        return F.cross_entropy(called(x), y, reduction="sum"), len(y)

    curvature_closure = counted if name == "SophiaG" else closure
    for _ in range(4):
        if plain:
            if optimizer.curvature_due:
                optimizer.update_curvature(curvature_closure)
            optimizer.zero_grad()
            closure().backward()
            optimizer.step()
        else:
            optimizer.step(closure, curvature_closure=counted if name == "SophiaG" else None)
    return values(net)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    share = slice(0, 6) if rank == 0 else slice(6, 12)
    results = {(name, plain): train(name, share, True, plain) for name in MAKERS for plain in (True, False)}
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or os.name == "nt", reason="needs torch.distributed")
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    mp.spawn(worker, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for (name, plain), got in first.items():
        assert torch.equal(got, second[name, plain]), f"{name}: ranks differ"
        want = train(name, slice(0, 12), False, plain)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
