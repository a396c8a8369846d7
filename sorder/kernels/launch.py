"""Host side of a kernel launch: layouts, grids and measured launch settings."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources

from sorder.kernels.spec import AttentionSpec

_MAX_GRID_X = 2**31 - 1
_MAX_ROW_STRIDE = 2**23
INTERPRETED = triton.knobs.runtime.interpret
"""Whether the kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` when Triton was imported), on CPU tensors."""


class Config(NamedTuple):
    """Launch settings of one kernel: query rows and keys of a tile, warps, software-pipeline stages."""

    rows: int
    cols: int
    warps: int
    stages: int

    def smaller(self) -> Config | None:
        """The next setting that needs less shared memory: fewer stages, then half the longer side."""
        if self.stages > 1:
            return self._replace(stages=self.stages - 1)
        if max(self.rows, self.cols) == 16:
            return None
        if self.rows >= self.cols:
            return self._replace(rows=self.rows // 2)
        return self._replace(cols=self.cols // 2)


class Heads:
    """The leading dimensions of one attention problem, folded to the three that kernels address by strides."""

    def __init__(self, query: torch.Tensor) -> None:
        self.lead = query.shape[:-2]
        self.count = math.prod(self.lead)
        if len(self.lead) <= 3:
            self.folded = (1,) * (3 - len(self.lead)) + tuple(self.lead)
        else:
            self.folded = (math.prod(self.lead[:-2]), self.lead[-2], self.lead[-1])

    def fold(self, *matrices: torch.Tensor | None) -> tuple[Any, ...]:
        """Matrices (..., N, d) with at most three leading dimensions and a unit stride along d.

        Copies only where it must.
        """
        return tuple(None if x is None else self._fold(x) for x in matrices)

    def _fold(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.lead) > 3:
            x = x.reshape(*self.folded, *x.shape[-2:])
        addressable = x.stride(-2) <= _MAX_ROW_STRIDE  # offsets within a tile are 32-bit
        return x if x.stride(-1) == 1 and addressable else x.contiguous()

    def unfold(self, x: torch.Tensor) -> torch.Tensor:
        """Undoes :meth:`fold` on an output."""
        return x.view(*self.lead, *x.shape[-2:]) if len(self.lead) > 3 else x

    def new_row_vector(self, like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Uninitialised (..., N) for the N rows of a folded matrix."""
        return like.new_empty((*self.lead, like.shape[-2]), dtype=dtype)

    def strides(self, *matrices: torch.Tensor | None) -> tuple[tuple[int, ...], ...]:
        pad = (0,) * max(0, 3 - len(self.lead))
        return tuple((0, 0, 0, 0) if x is None else pad + x.stride()[:-1] for x in matrices)

    def grid(self, tiles: int) -> tuple[int, int]:
        """Flat grid over heads × tiles, spilling from axis x to y past 2³¹ − 1 programs."""
        programs = self.count * tiles
        return min(programs, _MAX_GRID_X), -(-programs // _MAX_GRID_X)


def new_matrix(like: torch.Tensor, width: int) -> torch.Tensor:
    """Uninitialised output with the rows of ``like``; keeps its memory layout where the width agrees."""
    if like.shape[-1] == width:
        y = torch.empty_like(like)
        if y.stride(-1) == 1:  # it need not be where rows of ``like`` overlap
            return y
    return like.new_empty((*like.shape[:-1], width))


def row_vectors(*vectors: torch.Tensor | None) -> tuple[Any, ...]:
    """Row vectors (..., N) in contiguous memory, as the kernels read them."""
    return tuple(None if x is None else x.contiguous() for x in vectors)


def block(width: int) -> int:
    """Power of two that holds a head width (a product needs at least 16)."""
    return max(16, triton.next_power_of_2(width))


def run(
    kernel: Any,
    name: str,
    heads: Heads,
    spec: AttentionSpec,
    lengths: tuple[int, int],
    widths: tuple[int, int],
    arguments: tuple[Any, ...],
) -> None:
    """Launches one sweep: a program per head and tile of query rows, or of keys where ``name`` ends in "keys".

    Args:
        kernel: Triton function of (*arguments, lead1, lead2, tiles, heads, n_q, n_k, scale, constants…).
        name: its entry in the table of launch settings.
        lengths, widths: (Nq, Nk) and (d, dv).
        arguments: the tensors, the query first, then their strides.
    """
    (n_q, n_k), (d, dv) = lengths, widths
    q = arguments[0]
    absent = tuple(x is None for x in arguments)
    key = (name, widths, q.dtype, q.device, spec.precision, absent)
    config = _fitting.get(key) or settings(name, max(block(d), block(dv)), q.dtype)
    while True:
        constants: dict[str, Any] = {"RAGGED": n_q % config.rows != 0} if name.endswith("keys") else {}
        swept, tile = (n_k, config.cols) if name.endswith("keys") else (n_q, config.rows)
        tiles = triton.cdiv(swept, tile)
        try:
            with torch.cuda.device_of(q):
                kernel[heads.grid(tiles)](
                    *arguments, *heads.folded[1:], tiles, heads.count, n_q, n_k, spec.scale,
                    D=d, DV=dv, BLOCK_D=block(d), BLOCK_DV=block(dv), ROWS=config.rows, COLS=config.cols,
                    CAUSAL=spec.causal, PRECISION=_dot_precision(q, spec), **constants,
                    num_warps=config.warps, num_stages=config.stages,
                )  # fmt: skip
        except OutOfResources:  # a GPU with less shared memory than the table was measured on
            smaller = config.smaller()
            if smaller is None:
                raise
            config = smaller
        else:
            _fitting[key] = config
            return


def _dot_precision(q: torch.Tensor, spec: AttentionSpec) -> str:
    if q.dtype != torch.float32 or not q.is_cuda:
        return "ieee"
    tensor_cores = torch.version.hip is None and torch.cuda.get_device_capability(q.device) >= (8, 0)
    if not tensor_cores:
        return "ieee"
    if spec.precision == "tf32":
        return "tf32"
    # Six bfloat16 products are as fast as three TF32 ones and, with half the accumulation steps, more accurate.
    return "bf16x6" if "bf16x6" in _allowed_precisions() else "tf32x3"


@functools.cache
def _allowed_precisions() -> tuple[str, ...]:
    from triton.backends.nvidia.compiler import CUDAOptions

    return CUDAOptions.allowed_dot_input_precisions


# Measured on an H200. Rows are queries, columns keys; keyed on the kernel, bytes of an element and the wider padded
# head width; "dual" is with a tangent on the incoming gradient, one more resident tile.
_SETTINGS: dict[tuple[str, int, int], Config] = {
    ("forward", 2, 64): Config(128, 64, 4, 3),
    ("forward", 2, 128): Config(128, 64, 8, 3),
    ("forward", 2, 256): Config(64, 32, 8, 2),
    ("tangent", 2, 64): Config(128, 64, 8, 3),
    ("tangent", 2, 128): Config(128, 64, 8, 2),
    ("tangent", 2, 256): Config(64, 32, 8, 2),
    ("backward_keys", 2, 64): Config(64, 64, 4, 3),
    ("backward_keys", 2, 128): Config(32, 128, 8, 3),
    ("backward_keys", 2, 256): Config(16, 64, 8, 2),
    ("backward_queries", 2, 64): Config(128, 64, 8, 3),
    ("backward_queries", 2, 128): Config(128, 64, 8, 2),
    ("backward_queries", 2, 256): Config(64, 16, 8, 2),
    ("backward_tangent_keys", 2, 64): Config(32, 128, 8, 3),
    ("backward_tangent_keys", 2, 128): Config(32, 128, 8, 3),
    ("backward_tangent_keys", 2, 256): Config(16, 64, 8, 2),
    ("backward_tangent_queries", 2, 64): Config(128, 64, 8, 3),
    ("backward_tangent_queries", 2, 128): Config(128, 64, 8, 2),
    ("backward_tangent_queries", 2, 256): Config(64, 16, 8, 2),
    ("backward_tangent_dual_queries", 2, 64): Config(128, 64, 8, 3),
    ("backward_tangent_dual_queries", 2, 128): Config(128, 32, 8, 2),
    ("backward_tangent_dual_queries", 2, 256): Config(64, 16, 8, 1),
    ("forward", 4, 64): Config(64, 32, 4, 2),
    ("forward", 4, 128): Config(64, 32, 8, 2),
    ("forward", 4, 256): Config(32, 16, 8, 1),
    ("tangent", 4, 64): Config(64, 32, 4, 2),
    ("tangent", 4, 128): Config(64, 32, 8, 1),
    ("tangent", 4, 256): Config(32, 16, 8, 1),
    ("backward_keys", 4, 64): Config(32, 64, 4, 2),
    ("backward_keys", 4, 128): Config(32, 32, 8, 1),
    ("backward_keys", 4, 256): Config(16, 16, 8, 1),
    ("backward_queries", 4, 64): Config(64, 32, 4, 2),
    ("backward_queries", 4, 128): Config(32, 32, 8, 1),
    ("backward_queries", 4, 256): Config(16, 16, 8, 1),
    ("backward_tangent_keys", 4, 64): Config(32, 64, 4, 1),
    ("backward_tangent_keys", 4, 128): Config(32, 32, 8, 1),
    ("backward_tangent_keys", 4, 256): Config(16, 16, 8, 1),
    ("backward_tangent_queries", 4, 64): Config(64, 32, 4, 1),
    ("backward_tangent_queries", 4, 128): Config(32, 32, 8, 1),
    ("backward_tangent_queries", 4, 256): Config(16, 16, 8, 1),
}
_fitting: dict[tuple[Any, ...], Config] = {}
"""Settings that were found to fit, by problem and device."""
_INTERPRETER = Config(32, 16, 4, 1)  # small, so that short tests cross many tile borders


@functools.cache
def settings(kernel: str, block_d: int, dtype: torch.dtype) -> Config:
    """Launch settings of ``kernel`` for a padded head width and dtype. Never keyed on the sequence length."""
    if INTERPRETED:
        return _INTERPRETER
    width = max(64, block_d)
    fallback = (kernel.replace("_dual", ""), dtype.itemsize, width)
    return _SETTINGS.get((kernel, dtype.itemsize, width)) or _SETTINGS[fallback]
