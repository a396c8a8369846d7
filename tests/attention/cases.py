"""One table of attention problems; every implementation of the four maps is compared with the oracle on it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

# Relative error of each output against float64, unit-normal inputs; in 16 bits one unit of rounding.
BOUNDS = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
TF32_BOUND = 6e-4


@dataclass(frozen=True)
class Case:
    """One attention problem: lengths, widths, mask, how its inputs lie in memory, and which of them move."""

    n_q: int
    n_k: int
    d: int
    dv: int
    causal: bool
    layout: str = "contiguous"
    lead: tuple[int, ...] = (2, 2)
    tangents: str = "qkv"
    cotangents: str = "o"
    cotangent_tangents: str = "o"

    def __str__(self) -> str:
        mask = "causal" if self.causal else "dense"
        letters = f"{self.tangents}-{self.cotangents}-{self.cotangent_tangents or 'none'}"
        return f"{self.n_q}x{self.n_k}-d{self.d}-dv{self.dv}-{mask}-{self.layout}-{letters}"


def parametrize(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=str)


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


@dataclass
class Problem:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cotangents: tuple[torch.Tensor | None, torch.Tensor | None]
    tangents: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
    cotangent_tangents: tuple[torch.Tensor | None, torch.Tensor | None]


def _matrix(lead: tuple[int, ...], n: int, width: int, layout: str) -> torch.Tensor:
    if layout == "heads_last":  # (…, N, H, d) seen as (…, H, N, d)
        return torch.randn(*lead[:-1], n, lead[-1], width, dtype=torch.float64).transpose(-3, -2)
    if layout == "fused":  # the middle slice of rows three times as wide
        return torch.randn(*lead, n, 3 * width, dtype=torch.float64)[..., width : 2 * width]
    if layout == "odd_width_stride":
        return torch.randn(*lead, n, 2 * width, dtype=torch.float64)[..., ::2]
    if layout == "expanded":
        return torch.randn(*lead[:-1], 1, n, width, dtype=torch.float64).expand(*lead, n, width)
    return torch.randn(*lead, n, width, dtype=torch.float64)


def make(case: Case, dtype: torch.dtype, device: str | torch.device) -> Problem:
    """Unit-normal tensors of the case, rounded to ``dtype``; row vectors in float32 (float64 for float32 problems)."""

    def matrix(n: int, width: int) -> torch.Tensor:
        x = _matrix(case.lead, n, width, case.layout)
        if case.layout in ("expanded", "odd_width_stride"):  # .to() would make these contiguous
            base = x[..., :1, :, :] if case.layout == "expanded" else x
            y = base.to(device, dtype)
            return y.expand(x.shape) if case.layout == "expanded" else torch.stack([y, y], -1).flatten(-2)[..., ::2]
        return x.to(device, dtype)

    def vector(present: bool) -> torch.Tensor | None:
        wide = torch.float32 if dtype.itemsize == 2 else torch.float64
        return torch.randn(*case.lead, case.n_q, dtype=torch.float64).to(device, wide) if present else None

    def chosen(x: torch.Tensor, letter: str, letters: str) -> torch.Tensor | None:
        return x if letter in letters else None

    sizes = ((case.n_q, case.d), (case.n_k, case.d), (case.n_k, case.dv))
    q, k, v = (matrix(*size) for size in sizes)
    tangents = tuple(chosen(matrix(*size), letter, case.tangents) for size, letter in zip(sizes, "qkv", strict=True))
    do, tdo = (
        chosen(matrix(case.n_q, case.dv), "o", letters) for letters in (case.cotangents, case.cotangent_tangents)
    )
    dl, tdl = (vector("l" in letters) for letters in (case.cotangents, case.cotangent_tangents))
    return Problem(q, k, v, (do, dl), tangents, (tdo, tdl))  # type: ignore[arg-type]
