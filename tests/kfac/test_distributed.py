"""Two processes with half a batch each: factors and steps of K-FAC and the hybrid are those of the global batch."""

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

from sorder.kfac import KFACPreconditioner
from sorder.optim import KFAC, NewtonCG
from tests.cases import relative_error
from tests.optim.problem import data, model, values

# Signs and labels are drawn rank by rank; those of exact square roots cancel, where rows do not mix.
KFAC_OPTIONS: dict[str, dict[str, Any]] = {
    "quadratic": {},
    "ekfac": {"inverse": "ekfac", "inverse_interval": 2},
    "kl": {"step_rule": "kl", "kl_bound": 0.05, "factor_interval": 2, "damping": 0.1},
}
HYBRID_OPTIONS: dict[str, dict[str, Any]] = {"hybrid": {}, "hybrid ekfac": {"inverse": "ekfac"}}
STEPS, ROWS = 3, 12


def factors_of(factors: Any) -> list[Tensor]:
    found = [t for n in range(len(factors.blocks)) for pair in factors.terms(n) for t in pair]
    return found + [s["scale"] / s["weight"] for s in factors.scales if s is not None]


def train(name: str, share: slice, parallel: bool, plain: bool = False, **more: Any) -> list[Tensor]:
    """Parameters and factors after a few steps; ``plain`` leaves backward and averages to the caller, and to DDP."""
    x, y = (t[share] for t in data(rows=ROWS))
    net = model()
    called: nn.Module = DistributedDataParallel(net) if parallel else net
    kfac: KFACPreconditioner | None = None
    optimizer: Any
    if name in KFAC_OPTIONS:
        optimizer = KFAC(called.parameters(), **{"estimator": "type-2", **KFAC_OPTIONS[name], **more})
    else:
        kfac = KFACPreconditioner(net, estimator="type-2", **HYBRID_OPTIONS[name])
        optimizer = NewtonCG(called.parameters(), preconditioner=kfac, **more)

    def closure() -> Tensor:
        return F.cross_entropy(called(x), y)

    for _ in range(STEPS):
        if plain:
            if optimizer.curvature_due:
                optimizer.update_curvature(closure)
            optimizer.zero_grad()
            closure().backward()
            optimizer.step()
        else:
            optimizer.step(closure)
    return [values(net), *factors_of(optimizer._factors() if kfac is None else kfac.factors)]


def sampled(rank: int | None) -> list[Tensor]:
    """The factors that two batches of 2,000 rows give with sampled labels."""
    x, y = data(rows=4000)
    share = slice(None) if rank is None else slice(2000 * rank, 2000 * rank + 2000)
    net = model()
    optimizer = KFAC(net, process_group=None if rank is None else dist.group.WORLD)
    optimizer.step(lambda: F.cross_entropy(net(x[share]), y[share]))
    return factors_of(optimizer._factors())


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    share = slice(0, ROWS // 2) if rank == 0 else slice(ROWS // 2, ROWS)
    results: dict[str, list[Tensor]] = {}
    for name in (*KFAC_OPTIONS, *HYBRID_OPTIONS):
        results[f"{name}, group"] = train(name, share, False, process_group=dist.group.WORLD)
        results[f"{name}, ddp"] = train(name, share, True)
    results["kl, plain"] = train("kl", share, True, plain=True)
    results["sampled"] = sampled(rank)
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or os.name == "nt", reason="needs torch.distributed")
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    mp.spawn(worker, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    want = {name: train(name, slice(None), False) for name in (*KFAC_OPTIONS, *HYBRID_OPTIONS)}
    for key, got in first.items():
        assert all(torch.equal(a, b) for a, b in zip(got, second[key], strict=True)), f"{key}: ranks differ"
        if key != "sampled":
            assert relative_error(got, want[key.split(",")[0]]) < 1e-9, key
    # Sampled labels are other ones: the factors agree as two estimates from 4,000 rows do.
    whole = sampled(None)
    error = relative_error(first["sampled"], whole)
    assert 1e-6 < error < 0.1, error
