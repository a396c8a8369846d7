"""Curvature products through norms of 16-bit inputs, over whose tangents the next matrix product ran into float32.

On the CPU PyTorch keeps float32 statistics beside float32 weights only, on CUDA beside 16-bit ones, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sorder.curvature import CurvaturePoint
from sorder.func import ggnvp, hvp
from sorder.func.hvp import Mode
from sorder.func.wide_norms import ForwardMode
from tests.cases import flatten, relative_error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (8,), w, b),
    "torch.layer_norm": lambda x, w, b: torch.layer_norm(x, (8,), w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (8,), w),
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "torch.group_norm": lambda x, w, b: torch.group_norm(x, 2, w, b),
    "batch_norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "batch_norm eval": lambda x, w, b: F.batch_norm(x, b.detach(), w.detach().square(), w, b),
    "instance_norm": lambda x, w, b: F.instance_norm(x.view(6, 2, 4), None, None, w[:2], b[:2]).flatten(1),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("mixed", [False, True], ids=["16-bit weights", "float32 weights"])
def test_products_through_norms(name: str, dtype: torch.dtype, mixed: bool, device: str) -> None:
    def narrow(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype)

    x, matrix, b = narrow(6, 8), narrow(8, 8) / 8, narrow(8)
    w, v = narrow(8).abs() + 0.5, (narrow(6, 8), narrow(8))
    if mixed:
        w, b, v = w.float(), b.float(), (v[0], v[1].float())

    def products(x: Tensor, w: Tensor, b: Tensor, matrix: Tensor, v: tuple[Tensor, Tensor]) -> list[Tensor]:
        def model(x: Tensor, w: Tensor) -> Tensor:
            return OPERATIONS[name](x, w, b) @ matrix

        def loss(z: Tensor) -> Tensor:
            return (z.double() + 1).pow(3).mean()

        found = [hvp(lambda *p: loss(model(*p)), (x, w), v, mode=mode) for mode in get_args(Mode)]
        found.append(ggnvp(model, loss, (x, w), v))
        for got in found:
            assert [t.dtype for t in got] == [x.dtype, w.dtype]
        return [torch.cat([t.flatten().double() for t in got]) for got in found]

    want = products(x.double(), w.double(), b.double(), matrix.double(), (v[0].double(), v[1].double()))
    # Some roundings in a row, here of numbers that partly cancel.
    for got, exact in zip(products(x, w, b, matrix, v), want, strict=True):
        assert relative_error(got, exact) < 20 * EPS[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["hessian", "ggn"])
@pytest.mark.parametrize("mode", ["forward-over-reverse", "reverse-over-reverse"])
def test_points_of_a_bfloat16_model(kind: str, mode: str, device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(device, torch.bfloat16)
    model[1].requires_grad_(False)
    if device == "cpu":
        model[1].float()
    x, y = torch.randn(6, 4).to(device, torch.bfloat16), torch.randint(0, 3, (6,), device=device)
    v = [torch.randn_like(p) for p in (*model[0].parameters(), *model[2].parameters())]

    def product() -> Tensor:
        params = [p for p in model.parameters() if p.requires_grad]

        def closure() -> Tensor:
            return F.cross_entropy(model(x).to(torch.promote_types(x.dtype, torch.float32)), y)

        with CurvaturePoint(closure, params, kind, mode=mode) as point:
            return flatten([t.double() for t in point.product([t.to(p) for t, p in zip(v, params, strict=True)])])

    got = product()
    model, x = model.double(), x.double()
    assert relative_error(got, product()) < 20 * EPS[torch.bfloat16]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
def test_running_statistics_are_updated_once_as_by_pytorch(norm: Callable[..., Tensor], device: str) -> None:
    x = (3 + 2 * torch.randn(5, 4, 6)).to(device, torch.bfloat16)
    start = (torch.zeros(4).to(x), torch.ones(4).to(x))
    want, got = ([t.clone() for t in start] for _ in range(2))
    out = norm(x, *want, None, None, True, 0.25)
    with ForwardMode():
        widened = norm(x, *got, None, None, True, 0.25)
    assert widened.dtype == out.dtype and relative_error(widened, out) < 2 * EPS[torch.bfloat16]
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in zip(got, want, start, strict=True))
