"""F, J, B and T: the PyTorch twin, the Triton kernels (interpreted here, compiled on a GPU) and the fused routes,
against the oracle.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sorder.kernels import twin
from sorder.kernels.mask import Visibility
from sorder.kernels.spec import AttentionSpec, lse_dtype
from sorder.ops import fused, maps

from . import oracle
from .cases import BOUNDS, FEATURES, LARGE, LARGE_FEATURES, SMALL, TF32_BOUND, Case, make, parametrize

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
round_to_tf32 = pytest.importorskip("sorder.kernels.tiles").round_to_tf32
KERNELS = SimpleNamespace(**maps._KERNELS)


def outputs(
    implementation: Any, case: Case, dtype: torch.dtype, device: str, precision: str = "ieee"
) -> dict[str, Any]:
    """What each map gives for the case, and what it should give."""
    p = make(case, dtype, device)
    spec = replace(p.spec, precision=precision)
    inputs = (p.q, p.k, p.v, p.bias, p.vis)
    o, lse = implementation.forward(*inputs, spec)
    caches = (*inputs, o, lse)
    if all(t is None for t in p.tangents):
        to = tlse = low = None
    else:
        to, tlse, low = implementation.tangent(*caches, *p.tangents, spec)
    first = implementation.backward(*caches, *p.cotangents, "qkvb", spec)
    second = implementation.backward_tangent(
        *caches, *p.cotangents, *p.tangents, to, tlse, low, *p.cotangent_tangents, "qkvb", spec
    )
    names = ("o", "lse", "to", "tlse", "dq", "dk", "dv", "dbias", "tdq", "tdk", "tdv", "tdbias")
    got = dict(zip(names, (o, lse, to, tlse, *first, *second), strict=True))
    return {name: (got[name], want) for name, want in p.expected().items()}


def check(results: dict[str, Any], bound: float) -> None:
    for name, (got, want) in results.items():
        if got is None:
            assert want.norm() == 0, f"{name} is absent, but not zero"
        elif want.norm() < 1e-12 * math.sqrt(want.numel()):  # zero but for the oracle's rounding, such as at one key
            assert got.double().norm() <= 100 * bound * math.sqrt(want.numel()), name
        else:
            assert oracle.relative_error(got, want) <= bound, name


@parametrize(SMALL + FEATURES)
@pytest.mark.parametrize("tile", [2**22, 64])
def test_twin_is_exact_in_float64(case: Case, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "_TILE_ELEMENTS", tile)  # also with a single query row a tile
    check(outputs(twin, case, torch.float64, "cpu"), BOUNDS[torch.float64])


@parametrize(SMALL + FEATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_twin_rounds_only_its_outputs(case: Case, dtype: torch.dtype) -> None:
    check(outputs(twin, case, dtype, "cpu"), BOUNDS[dtype])


@parametrize(SMALL + FEATURES)
def test_routes(case: Case) -> None:
    """Through the operators every map gives, and leaves out, what its implementation does."""
    check(outputs(maps, case, torch.float64, "cpu"), BOUNDS[torch.float64])


def _stand_in_forward(*args: Any) -> Any:
    q, k, v, spec, _ = args
    return twin.forward(q, k, v, None, None, spec)


def _stand_in_backward(*args: Any) -> Any:
    q, k, v, o, lse, do, spec, _ = args
    return twin.backward(q, k, v, None, None, o, lse, do, None, "qkv", spec)[:3]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """PyTorch's fused kernels replaced, so that what is around them runs on the CPU; the calls so far."""
    calls: list[str] = []

    def backend(q: Any, k: Any, v: Any, bias: Any, vis: Visibility, spec: AttentionSpec) -> str | None:
        plain = bias is None and spec.softcap is None and not spec.dropout and all(x is None for x in vis)
        return "stand-in" if plain else None

    def recorded(function: Any) -> Any:
        return lambda *args: (calls.append(function.__name__), function(*args))[1]

    monkeypatch.setattr(fused, "backend", backend)
    monkeypatch.setattr(fused, "forward", recorded(_stand_in_forward))
    monkeypatch.setattr(fused, "backward", recorded(_stand_in_backward))
    return calls


@parametrize(SMALL + FEATURES)
def test_routes_on_fused_kernels(case: Case, stand_ins: list[str]) -> None:
    check(outputs(maps, case, torch.float64, "cpu"), BOUNDS[torch.float64])
    plain = not (case.bias or case.softcap or case.visible or case.alibi or case.dropout)
    expected = ["_stand_in_forward"] + ["_stand_in_backward"] * (case.cotangents == "o")
    assert stand_ins == (expected if plain else [])


def test_fused_kernels_give_only_what_is_wanted(stand_ins: list[str]) -> None:
    _wanted_subsets(maps, torch.float64, "cpu")
    assert stand_ins.count("_stand_in_backward") == 5


# In the interpreter features take a second or two each: every one in float32 or float16, in turn.
INTERPRETED = [(case, dtype) for case in SMALL for dtype in (torch.float32, torch.float16)] + [
    (case, (torch.float32, torch.float32, torch.float16)[i % 3]) for i, case in enumerate(FEATURES)
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted")
@pytest.mark.parametrize(("case", "dtype"), INTERPRETED, ids=str)
def test_kernels_in_the_interpreter(case: Case, dtype: torch.dtype) -> None:
    check(outputs(KERNELS, case, dtype, "cpu"), BOUNDS[dtype])


def _wanted_subsets(implementation: Any, dtype: torch.dtype, device: str) -> None:
    case = Case(37, 21, 16, 16, True)
    p = make(case, dtype, device)
    spec = AttentionSpec(0.25, True)
    o, lse = implementation.forward(p.q, p.k, p.v, None, None, spec)
    caches = (p.q, p.k, p.v, None, None, o, lse)
    to, tlse, low = implementation.tangent(*caches, *p.tangents, spec)

    def both(wanted: str) -> list[Any]:
        last = (*p.tangents, to, tlse, low, *p.cotangent_tangents, wanted, spec)
        first = implementation.backward(*caches, *p.cotangents, wanted, spec)
        return [*first, *implementation.backward_tangent(*caches, *p.cotangents, *last)]

    everything = both("qkvb")
    for wanted in ("q", "k", "v", "qv"):
        for name, got, want in zip("qkvbqkvb", both(wanted), everything, strict=True):
            if name in wanted:
                assert oracle.relative_error(got, want) <= BOUNDS[dtype]
            else:
                assert got is None


@pytest.mark.parametrize("implementation", [twin, maps], ids=["twin", "routes"])
def test_only_what_is_wanted_is_computed(implementation: Any) -> None:
    _wanted_subsets(implementation, torch.float64, "cpu")


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
        got, want = (m.forward(q, k.abs(), v, None, None, spec) for m in (KERNELS, twin))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)
        caches = (q, k.abs(), v, None, None, *want)
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
    o, lse = twin.forward(q, k, p.v, None, None, spec)
    assert lse.dtype == lse_dtype(q) == torch.float64
    dv = twin.backward(q, k, p.v, None, None, o, lse, torch.ones_like(o), None, "v", spec)[2]
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
@parametrize(LARGE + FEATURES + LARGE_FEATURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_on_the_gpu(case: Case, dtype: torch.dtype) -> None:
    # At one key dS = dP − δ is a difference of equals; what the rounding of O leaves of it is small beside dP only,
    # which grows with the root of the width.
    check(outputs(KERNELS, case, dtype, "cuda"), BOUNDS[dtype] * (max(8, case.dv**0.5) if case.n_k == 1 else 1))


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
