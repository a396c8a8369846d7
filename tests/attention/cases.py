"""One table of attention problems; every implementation of the four maps is compared with the oracle on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sorder.kernels.mask import Visibility
from sorder.kernels.philox import dropped
from sorder.kernels.spec import AttentionSpec

from . import oracle

# Relative error of each output against float64, unit-normal inputs; in 16 bits one unit of rounding.
BOUNDS = {torch.float64: 1e-13, torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
TF32_BOUND = 6e-4


@dataclass(frozen=True)
class Case:
    """One attention problem: lengths, widths, mask, how its inputs lie in memory, and which of them move.

    ``kv_heads`` are the heads of keys and values, if fewer than the query's. ``visible`` names an entry of ``VISIBLE``.
    ``bias`` has a letter for each dimension that it does not broadcast, of "b" (all leading but the last), "h", "q" and
    "k"; "!" if it hides some entries, and everything in the first row; "w" if it is wider than 16 bits.
    """

    n_q: int
    n_k: int
    d: int
    dv: int
    causal: bool
    layout: str = "contiguous"
    lead: tuple[int, ...] = (2, 2)
    tangents: str = "qkvb"
    cotangents: str = "o"
    cotangent_tangents: str = "o"
    kv_heads: int = 0
    visible: str = ""
    bias: str = ""
    softcap: float | None = None
    alibi: bool = False
    dropout: float = 0.0

    def __str__(self) -> str:
        mask = "causal" if self.causal else "dense"
        letters = f"{self.tangents}-{self.cotangents}-{self.cotangent_tangents or 'none'}"
        features = {
            f"kv{self.kv_heads}": self.kv_heads, self.visible: self.visible, f"bias_{self.bias}": self.bias,
            f"cap{self.softcap}": self.softcap, "alibi": self.alibi, f"drop{self.dropout}": self.dropout,
        }  # fmt: skip
        names = "".join(f"-{name}" for name, there in features.items() if there)
        return f"{self.n_q}x{self.n_k}-d{self.d}-dv{self.dv}-{mask}-{self.layout}-{letters}{names}"


def parametrize(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=str)


# What a row i of head (b, h) sees of keys j, dense. Each is an interval of keys but for "holes" and "keys".
Visible = Callable[[Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
VISIBLE: dict[str, Visible] = {
    "window": lambda b, h, i, j, n_q, n_k: (j >= i - 6) & (j <= i + 3),  # last rows see nothing if Nq > Nk + 6
    "bottom_right": lambda b, h, i, j, n_q, n_k: j <= i + n_k - n_q,  # first rows see nothing if Nq > Nk
    "prefix": lambda b, h, i, j, n_q, n_k: (j <= i) | (j < 11 + 4 * b),
    "padding": lambda b, h, i, j, n_q, n_k: (j >= 3 * b) & (j < n_k - 7 + 5 * b),
    "documents": lambda b, h, i, j, n_q, n_k: (3 * i // n_q == 3 * j // n_k) | (i < 0),
    "odd": lambda b, h, i, j, n_q, n_k: (j >= (7 * i + 3 * h) % 13) & (j < 5 + (11 * i + 5 * b) % n_k),  # not monotone
    "nothing": lambda b, h, i, j, n_q, n_k: (j < 0) & (i < 0),
    "holes": lambda b, h, i, j, n_q, n_k: (3 * i + 5 * j + b + h) % 4 > i % 3,
    "keys": lambda b, h, i, j, n_q, n_k: (j + 2 * b) % 3 != 0,
}

# Small enough for Triton's interpreter; together they cross tile borders, both masks, ragged lengths and absent
# tensors.
SMALL = [
    Case(37, 53, 20, 24, False),
    Case(37, 53, 16, 16, True, cotangents="ol", cotangent_tangents="ol"),
    Case(53, 37, 16, 32, True, layout="heads_last"),
    Case(1, 33, 16, 16, True, tangents="v"),
    Case(63, 1, 16, 16, False, tangents="qk"),
    Case(33, 33, 16, 16, True, layout="fused", tangents="q", cotangent_tangents=""),
    Case(17, 40, 24, 16, False, layout="odd_width_stride", tangents="kv", cotangents="l", cotangent_tangents=""),
    Case(40, 17, 16, 16, False, layout="expanded", lead=(2, 1, 2, 2), tangents="kv"),
]

# Every feature by itself and, pairwise, with others, layouts, widths, lengths and absent tensors.
FEATURES = [
    Case(37, 53, 20, 24, False, lead=(1, 4), kv_heads=2),
    Case(40, 33, 16, 16, True, lead=(2,), kv_heads=1, layout="heads_last", cotangents="ol", cotangent_tangents="ol"),
    Case(33, 40, 16, 24, False, lead=(2, 1, 2), kv_heads=1, visible="padding", tangents="k", cotangent_tangents=""),
    Case(45, 45, 16, 16, True, lead=(2,), visible="window", layout="fused"),
    Case(60, 37, 16, 16, False, lead=(1,), visible="window", cotangents="ol", tangents="qk"),
    Case(53, 21, 16, 16, False, lead=(4,), kv_heads=2, visible="bottom_right", cotangents="ol"),
    Case(21, 53, 24, 16, False, lead=(2,), visible="bottom_right", softcap=1.5, cotangent_tangents=""),
    Case(40, 40, 16, 16, False, lead=(2, 1), visible="prefix", alibi=True, tangents="v"),
    Case(35, 48, 16, 16, False, lead=(2, 2), visible="padding", bias="hqk", layout="heads_last"),
    Case(50, 50, 16, 16, True, lead=(1, 2), visible="documents", dropout=0.3),
    Case(37, 45, 16, 32, False, lead=(2, 2), visible="odd", cotangents="l", cotangent_tangents="l"),
    Case(17, 20, 16, 16, False, lead=(1, 2), visible="nothing", bias="k", cotangents="ol", cotangent_tangents="ol"),
    Case(34, 40, 16, 16, False, lead=(1, 2), visible="holes", tangents="qkv"),
    Case(34, 40, 16, 16, True, lead=(1, 2), visible="holes", bias="q", dropout=0.5, layout="odd_width_stride"),
    Case(25, 50, 16, 24, True, lead=(2, 2), kv_heads=1, visible="keys", softcap=0.7),
    Case(37, 35, 16, 16, False, lead=(2, 1), bias="bhqk", tangents="b", cotangent_tangents=""),
    Case(37, 53, 16, 16, True, lead=(2, 1), bias="qk!w", tangents="qb"),
    Case(33, 20, 24, 16, False, lead=(1, 4), kv_heads=2, bias="h", softcap=2.0, cotangents="ol"),
    Case(20, 33, 16, 16, False, lead=(2, 1, 2), bias="bqk!", softcap=1.0, dropout=0.2, tangents="kb"),
    Case(20, 33, 16, 16, False, lead=(2, 1), bias="bk", tangents="vb", cotangents="l", cotangent_tangents=""),
    Case(41, 41, 16, 16, True, lead=(2,), kv_heads=1, alibi=True, dropout=0.1, cotangents="ol"),
    Case(41, 30, 16, 40, False, lead=(1, 2), softcap=1.0, cotangents="ol", cotangent_tangents="ol", layout="expanded"),
    Case(30, 41, 16, 16, False, lead=(1, 2), dropout=0.6, cotangents="ol", cotangent_tangents="l", tangents="qkv"),
]

# Ragged lengths × every width × both masks, pairwise; only on a GPU.
LENGTHS = [(1, 1), (63, 77), (77, 63), (111, 1000), (1000, 111), (256, 3), (3, 256), (512, 512)]
WIDTHS = [16, 32, 40, 64, 80, 96, 128, 160, 192, 256]
LAYOUTS = ["contiguous", "heads_last", "fused", "odd_width_stride", "expanded"]
LARGE = [
    Case(*LENGTHS[(i + j) % len(LENGTHS)], d, d, causal, LAYOUTS[(i + 2 * j) % len(LAYOUTS)], cotangent_tangents=tdo)
    for i, d in enumerate(WIDTHS)
    for j, (causal, tdo) in enumerate([(True, ""), (False, "o")])
] + [
    Case(1824, 77, 80, 80, False),
    Case(256, 256, 64, 64, True, tangents="q", cotangent_tangents=""),
    Case(200, 200, 64, 64, True, tangents="v", cotangents="ol", cotangent_tangents="l"),
    Case(200, 300, 48, 112, True, tangents="k", cotangents="l", cotangent_tangents="ol"),
    Case(130, 130, 64, 64, False, lead=(2, 1, 3, 2)),
    Case(1024, 1024, 64, 64, True, lead=(1, 4)),
]
# Features × widths × lengths, pairwise; only on a GPU.
LARGE_FEATURES = [
    Case(
        *LENGTHS[(i + 3) % len(LENGTHS)], WIDTHS[(3 * i) % len(WIDTHS)], WIDTHS[(3 * i) % len(WIDTHS)], i % 3 == 0,
        LAYOUTS[i % 4], lead=(2, 4), kv_heads=(4, 2, 1)[i % 3], visible=visible, bias=bias,
        softcap=(None, 1.5)[i // 2 % 2], alibi=i % 5 == 1, dropout=(0.0, 0.0, 0.2)[i % 3],
        cotangents=("o", "ol")[i % 2], cotangent_tangents=("", "o", "ol")[i % 3],
    )
    for i, (visible, bias) in enumerate(
        [(v, b) for j, v in enumerate(["", *VISIBLE]) for b in (("", "hqk"), ("k", "bqk!"), ("", "bhqk"))[j % 3]]
    )
]  # fmt: skip


@dataclass
class Problem:
    """Tensors of a case, and what the oracle needs of its mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    vis: Visibility | None
    spec: AttentionSpec
    cotangents: tuple[Tensor | None, Tensor | None]
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    cotangent_tangents: tuple[Tensor | None, Tensor | None]
    visible: Tensor | None
    distance: Tensor | None
    kept: Tensor | None

    def expected(self) -> dict[str, Tensor]:
        """All outputs of the four maps by the oracle."""

        def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
            if self.distance is not None:
                bias = self.distance if bias is None else bias + self.distance
            return oracle.dense(
                q, k, v, self.spec.causal, self.spec.scale, bias=bias, visible=self.visible,
                softcap=self.spec.softcap, kept=self.kept,
            )  # fmt: skip

        inputs = (self.q, self.k, self.v) if self.bias is None else (self.q, self.k, self.v, self.bias)
        return oracle.maps(attend, inputs, self.tangents[: len(inputs)], self.cotangents, self.cotangent_tangents)


def _matrix(lead: tuple[int, ...], n: int, width: int, layout: str) -> Tensor:
    if layout == "heads_last":  # (…, N, H, d) seen as (…, H, N, d)
        return torch.randn(*lead[:-1], n, lead[-1], width, dtype=torch.float64).transpose(-3, -2)
    if layout == "fused":  # the middle slice of rows three times as wide
        return torch.randn(*lead, n, 3 * width, dtype=torch.float64)[..., width : 2 * width]
    if layout == "odd_width_stride":
        return torch.randn(*lead, n, 2 * width, dtype=torch.float64)[..., ::2]
    if layout == "expanded":
        return torch.randn(*lead[:-1], 1, n, width, dtype=torch.float64).expand(*lead, n, width)
    return torch.randn(*lead, n, width, dtype=torch.float64)


def _bias(case: Case, dtype: torch.dtype) -> Tensor | None:
    if not case.bias:
        return None
    *outer, heads = case.lead
    sizes = (("b", tuple(outer)), ("h", (heads,)), ("q", (case.n_q,)), ("k", (case.n_k,)))
    shape = [s if letter in case.bias else 1 for letter, size in sizes for s in size]
    bias = torch.randn(shape, dtype=torch.float64)
    if "!" in case.bias:
        bias[..., 3::5, ::3] = -torch.inf
        bias[..., 4::5, 1::3] = torch.finfo(torch.float16).min * 1e3
        bias[..., 0, :] = -torch.inf
    return bias.to(torch.promote_types(dtype, torch.float32) if "w" in case.bias else dtype)


def _visibility(case: Case, device: str | torch.device) -> tuple[Visibility | None, Tensor | None]:
    """What the maps get and, dense, what that shows."""
    start = stop = shown = slopes = seed = visible = None
    if case.visible:
        batch = case.lead[0] if len(case.lead) > 1 else 1
        b = torch.arange(batch)[(..., *(None,) * (len(case.lead) + 1))]
        h = torch.arange(case.lead[-1])[:, None, None]
        i, j = torch.arange(case.n_q)[:, None], torch.arange(case.n_k)
        visible = VISIBLE[case.visible](b, h, i, j, case.n_q, case.n_k)
        if case.visible in ("holes", "keys"):
            shown = visible.to(device).expand(*case.lead, case.n_q, case.n_k)
        else:
            if case.causal:
                visible = visible & (i >= j)
            visible = visible.expand(*visible.shape[:-2], case.n_q, case.n_k)
            anything = visible.any(-1)
            start = torch.where(anything, visible.int().argmax(-1), 3).to(device, torch.int32)
            stop = torch.where(anything, case.n_k - visible.flip(-1).int().argmax(-1), 2).to(device, torch.int32)
            start, stop = (x.expand(*case.lead, case.n_q) for x in (start, stop))
        visible = visible.to(device)
    if case.alibi:
        slopes = (2.0 ** -torch.arange(1, case.lead[-1] + 1)).to(device, torch.float32).expand(case.lead)
    if case.dropout:
        seed = torch.randint(-(2**63), 2**63 - 1, (2,)).to(device)
    vis = Visibility(start, stop, shown, slopes, seed)
    return (None if all(x is None for x in vis) else vis), visible


def make(case: Case, dtype: torch.dtype, device: str | torch.device) -> Problem:
    """Unit-normal tensors of the case, rounded to ``dtype``; row vectors in float32 (float64 for float32 problems)."""

    def matrix(n: int, width: int, heads: int = 0) -> Tensor:
        lead = (*case.lead[:-1], heads or case.lead[-1])
        x = _matrix(lead, n, width, case.layout)
        if case.layout in ("expanded", "odd_width_stride"):  # .to() would make these contiguous
            base = x[..., :1, :, :] if case.layout == "expanded" else x
            y = base.to(device, dtype)
            return y.expand(x.shape) if case.layout == "expanded" else torch.stack([y, y], -1).flatten(-2)[..., ::2]
        return x.to(device, dtype)

    def vector(present: bool) -> Tensor | None:
        wide = torch.float32 if dtype.itemsize == 2 else torch.float64
        return torch.randn(*case.lead, case.n_q, dtype=torch.float64).to(device, wide) if present else None

    def chosen(x: Tensor | None, letter: str, letters: str) -> Tensor | None:
        return x if letter in letters else None

    sizes = ((case.n_q, case.d, 0), (case.n_k, case.d, case.kv_heads), (case.n_k, case.dv, case.kv_heads))
    q, k, v = (matrix(*size) for size in sizes)
    moving = [chosen(matrix(*size), letter, case.tangents) for size, letter in zip(sizes, "qkv", strict=True)]
    do, tdo = (
        chosen(matrix(case.n_q, case.dv), "o", letters) for letters in (case.cotangents, case.cotangent_tangents)
    )
    dl, tdl = (vector("l" in letters) for letters in (case.cotangents, case.cotangent_tangents))
    bias = _bias(case, dtype)
    tbias = chosen(None if bias is None else torch.randn(bias.shape).to(bias.dtype), "b", case.tangents)
    bias, tbias = (None if x is None else x.to(device) for x in (bias, tbias))
    vis, visible = _visibility(case, device)
    ranged = vis is not None and vis.start is not None
    spec = AttentionSpec(case.d**-0.5, case.causal and not ranged, softcap=case.softcap, dropout=case.dropout)
    distance = kept = None
    if vis is not None and vis.slopes is not None:
        between = torch.arange(case.n_k, device=device) - torch.arange(case.n_q, device=device)[:, None]
        distance = vis.slopes.double()[..., None, None] * between
    if vis is not None and vis.seed is not None:
        shape = (*case.lead, case.n_q, case.n_k)
        counters = torch.arange(math.prod(shape), device=device).reshape(shape)
        kept = (~dropped(vis.seed, counters, case.dropout)).double() / (1 - case.dropout)
    return Problem(q, k, v, bias, vis, spec, (do, dl), (*moving, tbias), (tdo, tdl), visible, distance, kept)  # type: ignore[arg-type]
