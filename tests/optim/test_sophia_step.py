"""Sophia's fused step: equal to the foreach update, and without effect where a gradient is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sorder.optim import SophiaH, sophia_update
from tests.cases import relative_error
from tests.optim.problem import data, model, values

kernels = pytest.importorskip("sorder.kernels.sophia_step")

OPTIONS = {"lr": 0.03, "beta1": 0.9, "gamma": 1.5, "eps": 1e-12, "weight_decay": 0.1}
SHAPES = [(5,), (70, 3), (0,), (), (33,), (4096, 3)]
DTYPES = [
    pytest.param(torch.float32, torch.float32, torch.float32, id="float32"),
    pytest.param(torch.float16, torch.float16, torch.float32, id="float16, state float32"),
    pytest.param(torch.float16, torch.float32, torch.float16, id="gradient float32"),
    pytest.param(torch.bfloat16, torch.bfloat16, torch.bfloat16, id="bfloat16", marks=pytest.mark.gpu),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def tensors(dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, ...]]) -> list[list[Tensor]]:
    """p, g, m and h, the last of either sign."""
    generator = torch.Generator().manual_seed(0)
    kinds = (dtypes[0], dtypes[1], dtypes[2], dtypes[2])
    return [[torch.randn(s, generator=generator).to(DEVICE, d) for s in shapes] for d in kinds]


@pytest.mark.parametrize(("p_type", "g_type", "state_type"), DTYPES)
def test_it_is_the_foreach_update(p_type: torch.dtype, g_type: torch.dtype, state_type: torch.dtype) -> None:
    shapes = SHAPES if DEVICE == "cuda" else SHAPES[:-1]
    p, g, m, h = tensors((p_type, g_type, state_type), shapes)
    want_p, want_m = [t.clone() for t in p], [t.clone() for t in m]
    for _ in range(3):
        kernels.sophia_step(kernels.Batch(p, g, m, h), **OPTIONS)
        sophia_update.foreach_update(want_p, g, want_m, h, **OPTIONS)
    for found, want in ((p, want_p), (m, want_m)):
        for a, b in zip(found, want, strict=True):
            # A few roundings of float32, or one of the dtype that is stored.
            spacing = max(4 * torch.finfo(torch.float32).eps, torch.finfo(b.dtype).eps if b.itemsize == 2 else 0.0)
            torch.testing.assert_close(a, b, rtol=spacing, atol=spacing)
    assert relative_error([t.double() for t in p], [t.double() for t in tensors((p_type,) * 3, shapes)[0]]) > 0.01


def test_maximize_turns_the_gradient_around() -> None:
    p, g, m, h = tensors((torch.float32,) * 3, SHAPES[:3])
    other = [t.clone() for t in p], [-t for t in g], [t.clone() for t in m]
    kernels.sophia_step(kernels.Batch(p, g, m, h), **OPTIONS, maximize=True)
    kernels.sophia_step(kernels.Batch(*other, h), **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip((*p, *m), (*other[0], *other[2]), strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [(0, 4), (1, 100), (4, 32)])
def test_nothing_happens_where_a_gradient_is_not_finite(where: tuple[int, int], value: float) -> None:
    p, g, m, h = tensors((torch.float32,) * 3, SHAPES[:-1])
    g[where[0]].view(-1)[where[1]] = value
    before = [t.clone() for t in (*p, *m)]
    batch = kernels.Batch(p, g, m, h)
    search = kernels.NonFinite([batch])
    kernels.sophia_step(batch, **OPTIONS, unless=search)
    assert search.found()
    assert all(torch.equal(a, b) for a, b in zip((*p, *m), before, strict=True))


def test_large_finite_gradients_pass() -> None:
    p, g, m, h = tensors((torch.float32,) * 3, SHAPES[:-1])
    g[1].fill_(torch.finfo(torch.float32).max)
    assert not kernels.NonFinite([kernels.Batch(p, g, m, h)]).found()


def test_addresses_that_are_not_aligned_and_gradients_that_are_not_contiguous() -> None:
    p, g, m, h = (torch.randn(4, 101, device=DEVICE) for _ in range(4))
    base = torch.randn(405, device=DEVICE)
    p = base[1:].view(4, 101)
    g = torch.randn(101, 4, device=DEVICE).T
    want_p, want_m, first = p.clone(), m.clone(), base[0].clone()
    batch = kernels.Batch([p], [g], [m], [h])
    assert not batch.aligned
    kernels.sophia_step(batch, **OPTIONS)
    sophia_update.foreach_update([want_p], [g], [want_m], [h], **OPTIONS)
    torch.testing.assert_close((p, m), (want_p, want_m), rtol=1e-6, atol=1e-6)
    assert base[0] == first


def test_autograd_learns_of_the_change() -> None:
    p, g, m, h = tensors((torch.float32,) * 3, [(3,)])
    leaf = p[0].requires_grad_()
    loss = (leaf**2).sum()
    with torch.no_grad():
        kernels.sophia_step(kernels.Batch([leaf], g, m, h), **OPTIONS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_the_kernel_does_not_take() -> None:
    def fits(**changed: Any) -> bool:
        four = {name: torch.ones(4, 4) for name in "pgmh"} | changed
        return kernels.batches(*([t] for t in four.values())) is not None

    assert fits() and fits(p=nn.Parameter(torch.ones(4, 4))) and fits(g=torch.ones(4, 4).T)
    assert not fits(p=torch.ones(4, 4, dtype=torch.float64))
    assert not fits(p=torch.ones(4, 8)[:, ::2])
    assert not fits(g=torch.ones(4, 4).to_sparse())
    assert not fits(m=torch.ones(4, 4, dtype=torch.float16))


@pytest.mark.parametrize("maximize", [False, True])
def test_the_optimizer_steps_alike_with_and_without(monkeypatch: pytest.MonkeyPatch, maximize: bool) -> None:
    """Two groups, updates at steps 1 and 4; and a step with a NaN, which is refused and leaves no trace."""
    nets = [model().float().to(DEVICE) for _ in range(2)]
    records: list[list[Any]] = [[], []]
    for fused, net, found in zip((True, False), nets, records, strict=True):
        monkeypatch.setattr(sophia_update, "_on_gpu", lambda p, fused=fused: fused)
        calls: list[int] = []
        whole = sophia_update.fused_update
        monkeypatch.setattr(sophia_update, "fused_update", lambda *a, w=whole, c=calls: c.append(1) or w(*a))
        groups = [{"params": net[0].parameters(), "lr": 0.05, "gamma": 30.0}, {"params": net[2].parameters()}]
        optimizer = SophiaH(groups, lr=0.01, update_interval=3, maximize=maximize)
        for number in range(6):
            optimizer.zero_grad()
            closure = on_device(net)
            if optimizer.curvature_due:
                optimizer.update_curvature(closure)
            closure().backward()
            if number == 4:
                before, spoilt = values(net), net[2].bias.grad.clone()
                net[2].bias.grad[1] = float("nan")
                with pytest.raises(FloatingPointError, match=r"gradient of parameter 3 \(shape \(3,\)\) is not finite"):
                    optimizer.step()
                assert torch.equal(values(net), before)
                net[2].bias.grad.copy_(spoilt)
            optimizer.step()
            found.append(optimizer.last_step)
        assert len(calls) == (5 if fused else 0)
        monkeypatch.setattr(sophia_update, "fused_update", whole)
    torch.testing.assert_close(values(nets[0]), values(nets[1]), rtol=1e-5, atol=1e-6)
    for a, b in zip(*records, strict=True):
        assert (a.step, a.curvature_updated, a.win_rate) == (b.step, b.curvature_updated, b.win_rate)
        assert a.update_norm == pytest.approx(b.update_norm, rel=1e-4)
        assert a.curvature_norm == pytest.approx(b.curvature_norm, rel=1e-3)


def on_device(net: nn.Module) -> Any:
    x, y = (t.to(DEVICE) for t in data())
    return lambda: F.cross_entropy(net(x.float()), y)
