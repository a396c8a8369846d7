"""F, J, B and T: the PyTorch twin, the Triton kernels (interpreted here, compiled on a GPU) and the fused routes,
against the oracle.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sorder.kernels import twin
from sorder.kernels.spec import AttentionSpec, lse_dtype
from sorder.ops import maps

from . import oracle
from .cases import BOUNDS, LARGE, SMALL, TF32_BOUND, Case, make, parametrize

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
round_to_tf32 = pytest.importorskip("sorder.kernels.tiles").round_to_tf32
KERNELS = SimpleNamespace(**maps._KERNELS)


def outputs(
    implementation: Any, case: Case, dtype: torch.dtype, device: str, precision: str = "ieee"
) -> dict[str, Any]:
    """What each map gives for the case, and what it should give."""
    p = make(case, dtype, device)
    spec = AttentionSpec(case.d**-0.5, case.causal, precision)  # type: ignore[arg-type]
    o, lse = implementation.forward(p.q, p.k, p.v, spec)
    caches = (p.q, p.k, p.v, o, lse)
    to, tlse = implementation.tangent(*caches, *p.tangents, spec)
    dq, dk, dv = implementation.backward(*caches, *p.cotangents, "qkv", spec)
    tdq, tdk, tdv = implementation.backward_tangent(
        *caches, *p.cotangents, *p.tangents, to, tlse, *p.cotangent_tangents, "qkv", spec
    )
    want = oracle.maps(p.q, p.k, p.v, p.cotangents, p.tangents, p.cotangent_tangents, case.causal, spec.scale)
    names = ("o", "lse", "to", "tlse", "dq", "dk", "dv", "tdq", "tdk", "tdv")
    return {n: (x, want[n]) for n, x in zip(names, (o, lse, to, tlse, dq, dk, dv, tdq, tdk, tdv), strict=True)}


def check(results: dict[str, Any], bound: float) -> None:
    for name, (got, want) in results.items():
        if got is None:
            assert want.norm() == 0, f"{name} is absent, but not zero"
        elif want.norm() < 1e-12 * math.sqrt(want.numel()):  # zero but for the oracle's rounding, such as at one key
            assert got.double().norm() <= 100 * bound * math.sqrt(want.numel()), name
        else:
            assert oracle.relative_error(got, want) <= bound, name


@parametrize(SMALL)
@pytest.mark.parametrize("tile", [2**22, 64])
def test_twin_is_exact_in_float64(case: Case, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "_TILE_ELEMENTS", tile)  # also with a single query row a tile
    check(outputs(twin, case, torch.float64, "cpu"), BOUNDS[torch.float64])


@parametrize(SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_twin_rounds_only_its_outputs(case: Case, dtype: torch.dtype) -> None:
    check(outputs(twin, case, dtype, "cpu"), BOUNDS[dtype])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted")
@parametrize(SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_in_the_interpreter(case: Case, dtype: torch.dtype) -> None:
    check(outputs(KERNELS, case, dtype, "cpu"), BOUNDS[dtype])


def _wanted_subsets(implementation: Any, dtype: torch.dtype, device: str) -> None:
    case = Case(37, 21, 16, 16, True)
    p = make(case, dtype, device)
    spec = AttentionSpec(0.25, True)
    o, lse = implementation.forward(p.q, p.k, p.v, spec)
    caches = (p.q, p.k, p.v, o, lse)
    to, tlse = implementation.tangent(*caches, *p.tangents, spec)

    def both(wanted: str) -> list[Any]:
        last = (*p.tangents, to, tlse, *p.cotangent_tangents, wanted, spec)
        first = implementation.backward(*caches, *p.cotangents, wanted, spec)
        return [*first, *implementation.backward_tangent(*caches, *p.cotangents, *last)]

    everything = both("qkv")
    for wanted in ("q", "k", "v", "qv"):
        for name, got, want in zip("qkvqkv", both(wanted), everything, strict=True):
            if name in wanted:
                assert oracle.relative_error(got, want) <= BOUNDS[dtype]
            else:
                assert got is None


def test_twin_computes_only_what_is_wanted() -> None:
    _wanted_subsets(twin, torch.float64, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted")
def test_kernels_compute_only_what_is_wanted() -> None:
    _wanted_subsets(KERNELS, torch.float32, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted")
def test_strange_memory_in_the_interpreter() -> None:
    """Rows that overlap, rows 2²⁴ elements apart, and scores that overflow: as the twin has it."""
    spec = AttentionSpec(0.25, False)
    k, v = torch.randn(1, 8, 16), torch.randn(1, 8, 16)
    overlapping = torch.randn(40).unfold(0, 16, 1)[:5][None]
    apart = torch.empty_strided((1, 3, 16), (16, 2**24, 1)).copy_(torch.randn(1, 3, 16))
    overflowing = torch.full((1, 3, 16), -3e38)
    for q in (overlapping, apart, overflowing):
        got, want = KERNELS.forward(q, k.abs(), v, spec), twin.forward(q, k.abs(), v, spec)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)
        caches = (q, k.abs(), v, *want)
        for wanted in ("q", "k"):
            got, want_d = (m.backward(*caches, want[0], None, wanted, spec) for m in (KERNELS, twin))
            for a, b in zip(got, want_d, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_log_sum_exp_is_wide_where_rounding_it_would_cost_accuracy() -> None:
    """Scores of a few hundred: an L rounded to float32 would scale whole rows of P by 1 ± 1e-5."""
    p = make(Case(64, 64, 16, 16, False), torch.float32, "cpu")
    q, k = 16 * p.q, 16 * p.k
    spec = AttentionSpec(0.25, False)
    o, lse = twin.forward(q, k, p.v, spec)
    assert lse.dtype == lse_dtype(q) == torch.float64
    (dv,) = twin.backward(q, k, p.v, o, lse, torch.ones_like(o), None, "v", spec)[2:]
    assert abs(dv.double().sum().item() - o.numel()) <= 1e-6 * o.numel()  # rows of P sum to one


@triton.jit
def _round_kernel(X, Y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(Y + i, round_to_tf32(tl.load(X + i)))


@pytest.mark.parametrize("bits", ["random", "special"])
def test_tf32_rounds_to_nearest(bits: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(64, device=device) * torch.logspace(-30, 30, 64, device=device)
    if bits == "special":
        x[:5] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
        x[5] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # the NaN of all ones
    y = torch.empty_like(x)
    _round_kernel[(1,)](x, y, 64)
    mantissa, exponent = torch.frexp(x.double())
    want = torch.where(x.isfinite(), torch.ldexp((mantissa * 2**11).round(), exponent - 11), x.double())
    torch.testing.assert_close(y.double(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@parametrize(LARGE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_on_the_gpu(case: Case, dtype: torch.dtype) -> None:
    check(outputs(KERNELS, case, dtype, "cuda"), BOUNDS[dtype])


@pytest.mark.gpu
@parametrize([c for c in LARGE if c.d == c.dv and c.cotangents == "o" and (c.d <= 128 or not c.causal)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routes_on_the_gpu(case: Case, dtype: torch.dtype) -> None:
    """F and B on PyTorch's fused kernels where they take the input, J and T from their log-sum-exp."""
    check(outputs(maps, case, dtype, "cuda"), BOUNDS[dtype])


@pytest.mark.gpu
def test_tf32_on_the_gpu() -> None:
    check(outputs(KERNELS, LARGE[-1], torch.float32, "cuda", "tf32"), TF32_BOUND)


@pytest.mark.gpu
def test_bitwise_reproducible_on_the_gpu() -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        runs.append(outputs(KERNELS, LARGE[-1], torch.bfloat16, "cuda"))
    assert all(torch.equal(runs[0][name][0], runs[1][name][0]) for name in runs[0])
