"""What the kernels do beyond the case table: tile ranges, dropout words, the soft cap, splits, odd biases, blind rows.

In Triton's interpreter, or compiled where there is a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sorder.kernels import twin
from sorder.kernels.mask import Visibility
from sorder.kernels.philox import dropped
from sorder.kernels.spec import AttentionSpec

from .cases import BOUNDS, Case, make
from .oracle import relative_error

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
from sorder.kernels import launch  # noqa: E402
from sorder.kernels.backward import backward  # noqa: E402
from sorder.kernels.backward_tangent import backward_tangent  # noqa: E402
from sorder.kernels.forward import forward  # noqa: E402
from sorder.kernels.ranges import interval_columns, row_intervals  # noqa: E402
from sorder.kernels.scores import Score, cap, dropout_factor, dropout_threshold, score_arguments  # noqa: E402
from sorder.kernels.tangent import tangent  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = SimpleNamespace(forward=forward, tangent=tangent, backward=backward, backward_tangent=backward_tangent)
ROWS, COLS = 16, 32


def _window(i: Tensor, n_k: int) -> tuple[Tensor, Tensor]:
    return i - 20, i + 70


def _documents(i: Tensor, n_k: int) -> tuple[Tensor, Tensor]:
    ends = torch.tensor([7, 8, 120, n_k])
    n = torch.bucketize(i, ends, right=True)
    return torch.cat([ends.new_zeros(1), ends])[n], ends[n]


def _causal_after_padding(i: Tensor, n_k: int) -> tuple[Tensor, Tensor]:
    return torch.full_like(i, 35), i + 1  # the first 35 rows see nothing


def _without_order(i: Tensor, n_k: int) -> tuple[Tensor, Tensor]:
    return (i * 37) % n_k, (i * 37) % n_k + (i * 11) % 29 - 2


def _nothing(i: Tensor, n_k: int) -> tuple[Tensor, Tensor]:
    return i * 0 + 5, i * 0 + 5


INTERVALS: list[Callable[[Tensor, int], tuple[Tensor, Tensor]]] = [
    _window, _documents, _causal_after_padding, _without_order, _nothing
]  # fmt: skip


def _bounds(intervals: Callable[..., Any], n: int) -> tuple[Tensor, Tensor]:
    start, stop = intervals(torch.arange(n), n)
    return start.clamp(0, n).int().to(DEVICE), stop.clamp(0, n).int().to(DEVICE)


def _tiles(seen: Tensor) -> Tensor:
    """(row tiles, ROWS, key tiles, COLS) of a mask whose sizes need not be whole tiles; what is beyond repeats."""
    rows, cols = (-(-n // size) * size for n, size in zip(seen.shape, (ROWS, COLS), strict=True))
    i, j = (torch.arange(n, device=seen.device).clamp(max=m - 1) for n, m in zip((rows, cols), seen.shape, strict=True))
    return seen[i][:, j].view(rows // ROWS, ROWS, cols // COLS, COLS)


def _check_range(visited: list[int], some: Tensor, all_: Tensor, size: int, is_monotone: bool) -> None:
    """Tiles of [lo, end) hold all that is seen, those of [first, full) are seen whole; nothing is wasted."""
    lo, first, full, end = visited
    assert lo % size == first % size == full % size == 0
    where = some.nonzero().flatten()
    if where.numel() == 0:
        assert end <= lo or not is_monotone
        return
    assert lo <= where[0] * size
    assert end > where[-1] * size
    whole = all_.nonzero().flatten()
    assert all(first // size <= tile < full // size for tile in whole) or not is_monotone
    assert all_[first // size : full // size].all()
    if is_monotone:
        assert lo == where[0] * size
        assert end <= (where[-1] + 1) * size


@pytest.mark.parametrize("intervals", INTERVALS)
def test_sweeps_visit_the_tiles_that_see_something(intervals: Callable[..., Any]) -> None:
    n = 150
    start, stop = _bounds(intervals, n)
    is_monotone = intervals is not _without_order
    keys = torch.arange(n, device=DEVICE)
    tiles = _tiles((start[:, None] <= keys) & (keys < stop[:, None]))
    some, all_ = tiles.any(3).any(1), tiles.all(3).all(1)
    vis = Visibility(start=start.expand(2, 3, n), stop=stop.expand(2, 3, n))
    heads = launch.Heads(torch.empty(2, 3, n, 16))
    sweep = row_intervals(heads, score_arguments(heads, vis, None, None, (n, n)), (n, n), ROWS, COLS).sweep
    assert sweep is not None
    assert sweep.shape == (1, 2, 3, -(-n // COLS), 4)
    assert sweep.stride()[1:3] == (0, 0)  # heads with the same intervals share them
    for tile, visited in enumerate(sweep[0, 1, 2].tolist()):
        _check_range(visited, some[:, tile], all_[:, tile], ROWS, is_monotone)
    all_[:, -1] = False  # keys beyond the end must be masked in a sweep over keys
    columns = torch.empty(some.shape[0], 4, dtype=torch.int32, device=DEVICE)
    padded = [torch.cat([x, x[-1:].expand(some.shape[0] * ROWS - n)]) for x in (start, stop)]
    _interval_columns_kernel[(some.shape[0],)](*padded, columns, n, ROWS=ROWS, COLS=COLS)
    for tile, visited in enumerate(columns.tolist()):
        _check_range(visited, some[tile], all_[tile], COLS, is_monotone)


@triton.jit
def _interval_columns_kernel(START, STOP, OUT, n_k, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bounds = (tl.load(START + rows)[:, None], tl.load(STOP + rows)[:, None])
    lo, first, full, end = interval_columns(bounds, n_k, COLS)
    base = OUT + tl.program_id(0) * 4
    tl.store(base, lo)
    tl.store(base + 1, first)
    tl.store(base + 2, full)
    tl.store(base + 3, end)


@triton.jit
def _dropout_kernel(score, OUT, z, n_q, n_k, DROPOUT: tl.constexpr):
    rows, cols = tl.arange(0, 16)[:, None], tl.arange(0, 32)[None, :]
    at = (z + tl.zeros([], tl.int64), 1, 1, n_q, n_k)
    tl.store(OUT + rows * 32 + cols, dropout_factor(score, at, rows, cols, DROPOUT))


@pytest.mark.parametrize("seed", [(0, 0), (2**62 + 12345, 7), (-5, -(2**63)), (2**32, 2**40 + 1)])
def test_dropout_words_are_the_twins(seed: tuple[int, int]) -> None:
    z, n_q, n_k, p = 70_000, 300, 4096, 0.3  # counters past 2³²
    words = torch.tensor(seed, device=DEVICE)
    got = torch.empty(16, 32, device=DEVICE)
    _dropout_kernel[(1,)](Score(seed=words).argument(), got, z, n_q, n_k, DROPOUT=dropout_threshold(p))
    i, j = torch.arange(16, device=DEVICE)[:, None], torch.arange(32, device=DEVICE)
    want = ~dropped(words, (z * n_q + i) * n_k + j, p) / (1 - p)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


@triton.jit
def _cap_kernel(S, OUT, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(OUT + at, cap(tl.load(S + at), 0.5, SOFTCAP, EXACT))


@pytest.mark.parametrize(("exact", "bound"), [(True, 3e-7), (False, 3e-6)])
def test_soft_cap_is_accurate(exact: bool, bound: float) -> None:
    """Float32 inputs: relative to tanh itself, also near 0; 16-bit ones: to 1/1000 of their rounding."""
    magnitudes = torch.logspace(-6, 4, 512, device=DEVICE)
    s = torch.cat([magnitudes, -magnitudes])
    got = torch.empty_like(s)
    _cap_kernel[(8,)](s, got, SOFTCAP=2.0, EXACT=exact)
    want = torch.tanh(s.double() * 0.5 / 2.0)
    error = (got - want).abs()
    assert (error / want.abs() if exact else error).max() <= bound
    assert got.abs().max() <= 1


@pytest.mark.parametrize("exact", [True, False])
def test_a_cap_far_above_the_scores_leaves_them(exact: bool) -> None:
    s = torch.linspace(-20, 20, 512, device=DEVICE)
    t = torch.empty_like(s)
    _cap_kernel[(4,)](s, t, SOFTCAP=1e6, EXACT=exact)
    assert (t.double() * 1e6 - 0.5 * s.double()).abs().max() <= 3e-6


@pytest.mark.parametrize("splits", [2, 4])
def test_a_group_divided_among_programs(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a GPU has more multiprocessors than there are key heads and tiles."""
    case = Case(20, 16, 16, 16, True, lead=(1, 4), kv_heads=1)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: splits // 2)
    assert launch.Heads(torch.empty(1, 4, 20, 16), torch.empty(1, 1, 16, 16)).splits(torch.empty(0), 16) == splits
    _compare(case, lambda p: p)


def _maps(implementation: Any, inputs: tuple[Any, ...], p: Any, spec: AttentionSpec) -> dict[str, Any]:
    o, lse = implementation.forward(*inputs, spec)
    to, tlse, *low = implementation.tangent(*inputs, o, lse, *p.tangents, spec)
    first = implementation.backward(*inputs, o, lse, *p.cotangents, "qkvb", spec)
    rest = (*p.tangents, to, tlse, *low, *p.cotangent_tangents, "qkvb", spec)
    second = implementation.backward_tangent(*inputs, o, lse, *p.cotangents, *rest)
    names = ("o", "lse", "to", "tlse", "dq", "dk", "dv", "dbias", "tdq", "tdk", "tdv", "tdbias")
    return dict(zip(names, (o, lse, to, tlse, *first, *second), strict=True))


def _compare(case: Case, change: Callable[[Any], Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The kernels against the twin on a changed problem."""
    p = change(make(case, dtype, DEVICE))
    inputs = (p.q, p.k, p.v, p.bias, p.vis)
    got, want = (_maps(implementation, inputs, p, p.spec) for implementation in (KERNELS, twin))
    for name, x in want.items():
        assert (got[name] is None) == (x is None), name
        if x is not None:
            blind = x == -math.inf
            assert torch.equal(got[name] == -math.inf, blind), name
            a, b = (y.double().masked_fill(blind, 0.0) for y in (got[name], x))
            assert got[name].shape == x.shape
            assert got[name].dtype == x.dtype
            assert relative_error(a, b) <= 2 * BOUNDS[dtype], name
    return got


def test_a_bias_that_broadcasts_within_folded_dimensions() -> None:
    """Of the four leading dimensions two are folded, and the bias repeats itself along one of the two."""

    def change(p: Any) -> Any:
        bias, tbias = (torch.randn(1, 2, 1, 1, 5, 18, device=DEVICE) for _ in range(2))
        return replace(p, bias=bias, tangents=(*p.tangents[:3], tbias))

    assert _compare(Case(5, 18, 16, 16, False, lead=(2, 2, 1, 1)), change)["tdbias"].shape == (1, 2, 1, 1, 5, 18)


def test_a_bias_in_strange_memory() -> None:
    """Transposed, in float64, and with a tangent that repeats itself: each entry still has its own gradient."""

    def change(p: Any) -> Any:
        bias = torch.randn(2, 33, 20, device=DEVICE, dtype=torch.float64).mT[None]
        tbias = torch.randn(1, 2, 1, 33, device=DEVICE, dtype=torch.float64).expand(1, 2, 20, 33)
        return replace(p, bias=bias, tangents=(*p.tangents[:3], tbias))

    got = _compare(Case(20, 33, 16, 16, False, lead=(1, 2)), change)
    assert got["dbias"].std(-2).min() > 0  # rows differ


@pytest.mark.parametrize("hidden_by", ["interval", "shown", "bias"])
def test_rows_that_see_nothing_ignore_their_cotangents(hidden_by: str) -> None:
    """Zeros in value and every derivative are selected: not even NaN in such a row's cotangents reaches a result."""
    blind = [0, 3, 39]

    def change(p: Any) -> Any:
        shown = torch.ones(40, 20, dtype=torch.bool, device=DEVICE)
        shown[blind] = False
        stop = shown.sum(-1, dtype=torch.int32).expand(1, 1, 40)
        if hidden_by == "interval":
            p = replace(p, vis=Visibility(start=torch.zeros_like(stop), stop=stop))
        elif hidden_by == "shown":
            p = replace(p, vis=Visibility(shown=shown.expand(1, 1, 40, 20)))
        else:
            bias = torch.zeros(1, 1, 40, 20, device=DEVICE).masked_fill(~shown, -1e9)
            p = replace(p, bias=bias, tangents=(*p.tangents[:3], torch.randn_like(bias)))
        for x in (*p.cotangents, *p.cotangent_tangents):
            x[:, :, blind] = math.nan
        return p

    case = Case(40, 20, 16, 16, False, lead=(1, 1), cotangents="ol", cotangent_tangents="ol")
    got = _compare(case, change)
    for name in ("o", "to", "tlse", "dq", "tdq"):
        assert (got[name][:, :, blind] == 0).all(), name
    assert (got["lse"][:, :, blind] == -math.inf).all()


def test_the_float32_error_of_a_soft_cap_is_that_of_rounding() -> None:
    """At most three times the plain error (scores of tens), also for a cap that hardly acts."""
    spec = AttentionSpec(1.0, False)
    q, k, v = (torch.randn(1, 64, 16, device=DEVICE) for _ in range(3))
    errors = []
    for softcap in (None, 50.0, 2.0):
        capped = replace(spec, softcap=softcap)
        got = forward(q, k, v, None, None, capped)[0]
        want = twin.forward(q.double(), k.double(), v.double(), None, None, capped)[0]
        errors.append(relative_error(got, want))
    assert max(errors) <= 3 * max(errors[0], 1e-7)
