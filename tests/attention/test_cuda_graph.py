"""A whole second-order product in one CUDA graph, replayed on other data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import sorder

from . import oracle

pytestmark = pytest.mark.gpu


def reverse_over_reverse(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in tensors[:4]]
    q, k, v, do = leaves
    first = torch.autograd.grad(sorder.attention(q, k, v, is_causal=True), (q, k, v), do, create_graph=True)
    return torch.autograd.grad(first, leaves, tensors[4:])


def forward_over_reverse(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (sorder.attention(q, k, v, is_causal=True) * tensors[3]).sum()

    return torch.func.jvp(torch.func.grad(loss, (0, 1, 2)), tensors[:3], tensors[4:])[1]


@pytest.mark.parametrize("product", [reverse_over_reverse, forward_over_reverse])
@pytest.mark.parametrize("n", [200, 16384])  # on the portable kernels and, where there are any, on Hopper's
def test_capture_and_replay(product: Callable[..., tuple[torch.Tensor, ...]], n: int) -> None:
    static = [torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(7)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            product(*static)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product(*static)
    for _ in range(2):
        fresh = [torch.randn_like(x) for x in static]
        for x, y in zip(static, fresh, strict=True):
            x.copy_(y)
        graph.replay()
        for got, want in zip(captured, product(*fresh), strict=True):
            assert oracle.relative_error(got, want) < 1e-3  # sums in no determined order
