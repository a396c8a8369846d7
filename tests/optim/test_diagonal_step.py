"""The fused step of Sophia and AdaHessian: equal to the foreach update, and without effect after a bad gradient."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sorder.optim import AdaHessian, SophiaG, SophiaH, diagonal_update, fused_step, gnb_loss
from sorder.optim.diagonal_update import Rule
from tests.cases import relative_error
from tests.optim.problem import data, model, values

kernels = pytest.importorskip("sorder.kernels.diagonal_step")

RULES = {
    "Sophia": Rule(lr=0.03, keep=0.997, take=0.1, scale=1.5, eps=1e-12),
    "AdaHessian": Rule(lr=0.03, keep=0.997, take=0.1, scale=1.5, eps=1e-4, power=1.0),
    "AdaHessian, power 0.5": Rule(lr=0.03, keep=1.0, take=0.1, scale=1.5, eps=1e-4, power=0.5),
    "AdaHessian, power 0": Rule(lr=0.03, keep=1.0, take=0.1, scale=1.5, eps=1e-4, power=0.0),
}
SOPHIA = RULES["Sophia"]
SHAPES = [(5,), (70, 3), (0,), (), (33,), (4096, 3)]
DTYPES = [
    pytest.param(torch.float32, torch.float32, torch.float32, id="float32"),
    pytest.param(torch.float16, torch.float16, torch.float32, id="float16, state float32"),
    pytest.param(torch.float16, torch.float32, torch.float16, id="gradient float32"),
    pytest.param(torch.bfloat16, torch.bfloat16, torch.bfloat16, id="bfloat16", marks=pytest.mark.gpu),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def tensors(
    dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, ...]], signed: bool = True
) -> list[list[Tensor]]:
    """p, g, m and h, the last of either sign or with zeros."""
    generator = torch.Generator().manual_seed(0)
    kinds = (dtypes[0], dtypes[1], dtypes[2], dtypes[2])
    four = [[torch.randn(s, generator=generator).to(DEVICE, d) for s in shapes] for d in kinds]
    if not signed:
        four[3] = [h.clamp_min(0.0) for h in four[3]]
    return four


def take(
    p: list[Tensor], g: list[Tensor], m: list[Tensor], h: list[Tensor], rule: Rule, maximize: bool = False
) -> bool:
    batch = kernels.Batch(p, m, h)
    batch.set_gradients(g)
    return kernels.fused_step([(batch, rule._asdict())], kernels.Flag(batch.device), maximize)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("p_type", "g_type", "state_type"), DTYPES)
def test_it_is_the_foreach_update(
    p_type: torch.dtype, g_type: torch.dtype, state_type: torch.dtype, rule: Rule
) -> None:
    shapes = SHAPES if DEVICE == "cuda" else SHAPES[:-1]
    p, g, m, h = tensors((p_type, g_type, state_type), shapes, signed=rule.power is None)
    want_p, want_m, start = [t.clone() for t in p], [t.clone() for t in m], [t.double() for t in p]
    batch = kernels.Batch(p, m, h)
    flag = kernels.Flag(batch.device)
    for _ in range(3):
        batch.set_gradients(g)
        assert kernels.fused_step([(batch, rule._asdict())], flag)
        diagonal_update.update(want_p, g, want_m, h, rule)
    for found, want in ((p, want_p), (m, want_m)):
        for a, b in zip(found, want, strict=True):
            # A few roundings of float32 (more on a GPU, whose foreach roots and quotients are rounded otherwise), or
            # one of the dtype that is stored.
            roundings = 128 if rule.power is not None and DEVICE == "cuda" else 8
            stored = torch.finfo(b.dtype).eps if b.itemsize == 2 else 0.0
            spacing = max(roundings * torch.finfo(torch.float32).eps, stored)
            torch.testing.assert_close(a, b, rtol=spacing, atol=spacing)
    assert relative_error([t.double() for t in p], start) > 0.01


def test_maximize_turns_the_gradient_around() -> None:
    p, g, m, h = tensors((torch.float32,) * 3, SHAPES[:3])
    other = [t.clone() for t in p], [-t for t in g], [t.clone() for t in m]
    take(p, g, m, h, SOPHIA, maximize=True)
    take(*other, h, SOPHIA)
    assert all(torch.equal(a, b) for a, b in zip((*p, *m), (*other[0], *other[2]), strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [(0, 4), (1, 100), (4, 32)])
def test_nothing_happens_where_a_gradient_is_not_finite(where: tuple[int, int], value: float) -> None:
    """And with the same flag, the step after it is taken."""
    p, g, m, h = tensors((torch.float32,) * 3, SHAPES[:-1])
    spoilt = [t.clone() for t in g]
    spoilt[where[0]].view(-1)[where[1]] = value
    before = [t.clone() for t in (*p, *m)]
    batch = kernels.Batch(p, m, h)
    flag = kernels.Flag(batch.device)
    batch.set_gradients(spoilt)
    assert not kernels.fused_step([(batch, SOPHIA._asdict())], flag)
    assert all(torch.equal(a, b) for a, b in zip((*p, *m), before, strict=True))
    batch.set_gradients(g)
    assert kernels.fused_step([(batch, SOPHIA._asdict())], flag)
    assert all(not torch.equal(a, b) for a, b in zip((*p, *m), before, strict=True) if a.numel())


def test_one_bad_gradient_stops_the_other_batches() -> None:
    four, other = tensors((torch.float32,) * 3, [(40,)]), tensors((torch.float16,) * 3, [(7,)])
    other[1][0][3] = float("inf")
    before = [t.clone() for t in (*four[0], *four[2], *other[0], *other[2])]
    launches = []
    for p, g, m, h in (four, other):
        batch = kernels.Batch(p, m, h)
        batch.set_gradients(g)
        launches.append((batch, SOPHIA._asdict()))
    assert not kernels.fused_step(launches, kernels.Flag(torch.device(DEVICE)))
    after = (*four[0], *four[2], *other[0], *other[2])
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_large_finite_gradients_pass() -> None:
    p, g, m, h = tensors((torch.float32,) * 3, SHAPES[:-1])
    g[1].fill_(torch.finfo(torch.float32).max)
    assert take(p, g, m, h, SOPHIA)


def test_addresses_that_are_not_aligned_and_gradients_that_are_not_contiguous() -> None:
    m, h = (torch.randn(4, 101, device=DEVICE) for _ in range(2))
    base = torch.randn(405, device=DEVICE)
    p, g = base[1:].view(4, 101), torch.randn(101, 4, device=DEVICE).T
    want_p, want_m, first = p.clone(), m.clone(), base[0].clone()
    assert take([p], [g], [m], [h], SOPHIA)
    diagonal_update.update([want_p], [g], [want_m], [h], SOPHIA)
    torch.testing.assert_close((p, m), (want_p, want_m), rtol=1e-6, atol=1e-6)
    assert base[0] == first


def test_autograd_learns_of_the_change() -> None:
    p, g, m, h = tensors((torch.float32,) * 3, [(3,)])
    leaf = p[0].requires_grad_()
    loss = (leaf**2).sum()
    with torch.no_grad():
        take([leaf], g, m, h, SOPHIA)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_are_not_kept() -> None:
    p, g, m, h = tensors((torch.float32,) * 3, [(3,)])
    batch = kernels.Batch(p, m, h)
    batch.set_gradients(g)
    kernels.fused_step([(batch, SOPHIA._asdict())], kernels.Flag(batch.device))
    assert batch.gradients == []


def test_what_the_kernels_do_not_take() -> None:
    def fits(**changed: Any) -> bool:
        return fused_step.serves(*({name: torch.ones(4, 4) for name in "pgmh"} | changed).values())

    assert fits() and fits(p=nn.Parameter(torch.ones(4, 4))) and fits(g=torch.ones(4, 4).T)
    assert not fits(p=torch.ones(4, 4, dtype=torch.float64))
    assert not fits(p=torch.ones(4, 8)[:, ::2])
    assert not fits(g=torch.ones(4, 4).to_sparse())
    assert not fits(m=torch.ones(4, 4, dtype=torch.float16))


COMPILE = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sorder.kernels import diagonal_step as kernels

def ptx(kernel, tiling, **constants):
    pointers = {"TABLE": "*i64", "GRADIENTS": "*i64", "PLACES": "*i32", "FLAG": "*i32", "ON_HOST": "*i32"}
    kinds = pointers | {"number": "i32", "tensors": "i32"}
    constants |= {"ALIGNED": True, "BLOCK": tiling.block}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else kinds.get(n, "fp32") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in pointers}
    source = ASTSource(kernel, signature, {(names.index(n),): c for n, c in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tiling.warps}).asm["ptx"]

assert ".v4.b32" in ptx(kernels.search_kernel, kernels.SEARCH, G_TYPE=tl.float32)
for power in (None, 1.0, 0.5, 0.0):
    types = dict.fromkeys(("P_TYPE", "G_TYPE", "STATE_TYPE"), tl.float32)
    code = ptx(kernels.step_kernel, kernels.STEP, **types, POWER=power, MAXIMIZE=False)
    # Of 16 bytes each: two stores for every eight elements of a thread, and loads of p, g and m at least.
    vectors = kernels.STEP.block // kernels.STEP.warps // 32 // 4
    assert code.count("st.global.v4.b32") == 2 * vectors, code.count("st.global.v4.b32")
"""


def test_the_kernels_compile_and_access_memory_by_16_bytes(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    found = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]


# ---------------------------------------------------------------------- in the optimizers

MAKERS: dict[str, Callable[..., Any]] = {
    "SophiaH": partial(SophiaH, lr=0.01, update_interval=3),
    "SophiaG": partial(SophiaG, lr=0.01, gamma=3.0, update_interval=3),
    "AdaHessian": partial(AdaHessian, lr=0.01, update_interval=3, weight_decay=0.1),
    "AdaHessian, every step": partial(AdaHessian, lr=0.01, hessian_power=0.7),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the launches, which take place on any device."""
    found: list[str] = []
    monkeypatch.setattr(fused_step, "_on_gpu", lambda p: True)
    whole, part = fused_step.kernels.fused_step, fused_step.update
    monkeypatch.setattr(fused_step.kernels, "fused_step", lambda *a: found.append("between") or whole(*a))
    monkeypatch.setattr(fused_step, "update", lambda *a: part(*a) and not found.append("update"))
    return found


def closures(net: nn.Module, optimizer: Any) -> tuple[Callable[[], Tensor], Callable[[], Any]]:
    x, y = (t.to(DEVICE) for t in data())

    def loss() -> Tensor:
        return F.cross_entropy(net(x.float()), y)

    return loss, (lambda: gnb_loss(net(x.float()))) if isinstance(optimizer, SophiaG) else loss


def train(optimizer: Any, net: nn.Module, steps: int, spoil: int | None = None) -> list[Any]:
    """Plain loops; at step ``spoil`` a gradient is not finite first. The records of the steps."""
    loss, curvature = closures(net, optimizer)
    records = []
    for number in range(steps):
        optimizer.zero_grad()
        if optimizer.curvature_due:
            optimizer.update_curvature(curvature)
        loss().backward()
        if number == spoil:
            before, kept = (values(net), copy.deepcopy(optimizer.state_dict())), net[2].bias.grad.clone()
            net[2].bias.grad[1] = float("nan")
            with pytest.raises(FloatingPointError, match=r"gradient of parameter 3 \(shape \(3,\)\) is not finite"):
                optimizer.step()
            assert torch.equal(values(net), before[0]) and str(optimizer.state_dict()) == str(before[1])
            net[2].bias.grad.copy_(kept)
        optimizer.step()
        records.append(optimizer.last_step)
    return records


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("maximize", [False, True])
def test_the_optimizers_step_alike_with_and_without(name: str, maximize: bool, launched: list[str]) -> None:
    """Two groups, updates among the steps, one refused."""
    nets = [model().float().to(DEVICE) for _ in range(2)]
    records = []
    for fused, net in zip((True, False), nets, strict=True):
        groups = [{"params": net[0].parameters(), "lr": 0.05}, {"params": net[2].parameters()}]
        optimizer = MAKERS[name](groups, maximize=maximize)
        if not fused:
            launched_before = list(launched)
            fused_step._on_gpu = lambda p: False  # the fixture puts it back
        records.append(train(optimizer, net, 6, spoil=4))
    every = name.endswith("every step")
    # Steps 1 and 4 of two groups; the others, and the one that was refused, in one go.
    assert sorted(launched_before) == (["update"] * 12 if every else ["between"] * 5 + ["update"] * 4)
    assert launched == launched_before
    torch.testing.assert_close(values(nets[0]), values(nets[1]), rtol=1e-5, atol=1e-6)
    assert relative_error(values(nets[0]), values(model().float().to(DEVICE))) > 0.01
    for a, b in zip(*records, strict=True):
        assert (a.step, a.curvature_updated) == (b.step, b.curvature_updated)
        assert a.update_norm == pytest.approx(b.update_norm, rel=1e-4)
        assert a.curvature_norm == pytest.approx(b.curvature_norm, rel=1e-3)
        assert getattr(a, "win_rate", None) == getattr(b, "win_rate", None)


def without(optimizer: Any, net: nn.Module) -> None:
    net[0].weight.grad = None


def moved(optimizer: Any, net: nn.Module) -> None:
    net[0].weight.data = net[0].weight.data.clone()


def reloaded(optimizer: Any, net: nn.Module) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def turned(optimizer: Any, net: nn.Module) -> None:
    state = optimizer.state[net[0].weight]
    state["exp_avg"] = -50.0 * state["exp_avg"]


def replaced(optimizer: Any, net: nn.Module) -> None:
    state = optimizer.state[net[0].weight]
    optimizer.state[net[0].weight] = {**state, "exp_avg": -50.0 * state["exp_avg"]}


def frozen(optimizer: Any, net: nn.Module) -> None:
    net[0].weight.requires_grad_(False)


def rescheduled(optimizer: Any, net: nn.Module) -> None:
    optimizer.param_groups[0]["lr"] *= 0.1


def counted(optimizer: Any, net: nn.Module) -> None:
    if isinstance(optimizer, AdaHessian):
        optimizer.state[net[0].weight]["steps"] += 5


@pytest.mark.parametrize("name", ["SophiaH", "AdaHessian"])
@pytest.mark.parametrize("change", [without, moved, reloaded, turned, replaced, frozen, rescheduled, counted])
def test_what_is_kept_from_step_to_step_follows_changes(
    name: str, change: Callable[..., None], launched: list[str]
) -> None:
    """Between two steps without an update something is changed behind the optimizer's back."""
    nets = [model().float().to(DEVICE) for _ in range(2)]
    for fused, net in zip((True, False), nets, strict=True):
        fused_step._on_gpu = lambda p, fused=fused: fused
        optimizer = MAKERS[name](net.parameters(), update_interval=10)
        train(optimizer, net, 2)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        change(optimizer, net)
        optimizer.step()
        optimizer.step()
    assert launched.count("between") == 3
    torch.testing.assert_close(values(nets[0]), values(nets[1]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pair], ids=["deepcopy", "itself"])
def test_a_copy_does_not_share_what_is_kept(clone: Callable[[Any], Any], launched: list[str]) -> None:
    net = model().float().to(DEVICE)
    optimizer = SophiaH(net.parameters(), lr=0.01, update_interval=10)
    train(optimizer, net, 3)
    other_net, other = clone((net, optimizer))
    before, others = values(net), values(other_net)
    train(other, other_net, 1)
    assert torch.equal(values(net), before) == (other is not optimizer)
    assert not torch.equal(values(other_net), others)
