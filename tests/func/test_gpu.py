"""What only a GPU shows: its generators, its autocast, its memory, and scalars on two devices."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sorder.func import checkpoint, cross_entropy_hvp, ggnvp, hvp
from sorder.func.output_hessian import sample_cross_entropy_targets
from sorder.linalg import Residual, cg
from tests.cases import relative_error

pytestmark = pytest.mark.gpu


class Stack(nn.Module):
    """Residual blocks with dropout, checkpointed or not."""

    def __init__(self, width: int, depth: int, use_checkpoint: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.use_checkpoint = use_checkpoint

    @staticmethod
    def step(block: nn.Module, h: Tensor) -> Tensor:
        return h + F.dropout(block(h), 0.1)

    def forward(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            step = functools.partial(self.step, block)
            h = checkpoint(step)(h) if self.use_checkpoint else step(h)
        return h


def product(use_checkpoint: bool, rows: int, autocast: bool = False) -> tuple[object, int]:
    torch.manual_seed(0)
    model = Stack(256, 8, use_checkpoint).cuda()
    x = torch.randn(rows, 256, device="cuda")
    params = {n: p.detach() for n, p in model.named_parameters()}
    v = {n: torch.randn_like(p) for n, p in params.items()}

    def f(params: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            return torch.func.functional_call(model, params, (x,)).float().square().mean()

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.manual_seed(5)
    result = hvp(f, (params,), (v,))
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


def test_checkpoint_replays_the_cuda_generator_and_saves_memory() -> None:
    plain, plain_peak = product(False, 16384)
    checkpointed, peak = product(True, 16384)
    assert relative_error(checkpointed, plain) < 1e-4
    assert peak < 0.5 * plain_peak


def test_checkpoint_replays_cuda_autocast() -> None:
    plain, _ = product(False, 512, autocast=True)
    checkpointed, _ = product(True, 512, autocast=True)
    assert relative_error(checkpointed, plain) < 2e-2


def test_large_vocabulary_memory() -> None:
    rows, vocabulary = 8192, 50304
    w = 0.02 * torch.randn(64, vocabulary, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16)
    y = torch.randint(0, vocabulary, (rows,), device="cuda")
    loss = lambda out: F.cross_entropy(out, y)  # noqa: E731
    peaks = []
    for run in (
        lambda: torch.func.grad(lambda w: loss(x @ w))(w),
        lambda: ggnvp(lambda w: x @ w, loss, (w,), (w,)),
    ):
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 1.5 * peaks[0]
    labels = sample_cross_entropy_targets(x @ w, y, torch.Generator("cuda").manual_seed(0))
    assert labels.shape == (rows,)
    z, u = x[:64] @ w, x[64:128] @ w
    want = cross_entropy_hvp(z.double(), y[:64], u.double(), reduction="sum")
    assert relative_error(cross_entropy_hvp(z, y[:64], u, reduction="sum"), want) < 3e-3


def test_cg_with_leaves_on_two_devices() -> None:
    a = torch.randn(12, 12, dtype=torch.float64)
    a = a @ a.T + torch.eye(12)
    rhs = [torch.randn(7, dtype=torch.float64, device="cuda"), torch.randn(5, dtype=torch.float64)]

    def matvec(v: list[Tensor]) -> list[Tensor]:
        out = a @ torch.cat([v[0].cpu(), v[1]])
        return [out[:7].cuda(), out[7:]]

    result = cg(matvec, rhs, stopping=Residual(rtol=1e-12))
    want = torch.linalg.solve(a, torch.cat([rhs[0].cpu(), rhs[1]]))
    assert result.x[0].is_cuda
    assert relative_error(torch.cat([result.x[0].cpu(), result.x[1]]), want) < 1e-9
