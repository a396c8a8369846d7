"""Host side of a kernel launch: layouts, grids and measured launch settings."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources

from sorder.kernels import autotune
from sorder.kernels.ranges import row_intervals
from sorder.kernels.scores import PLAIN, Score, dropout_threshold
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
    """The leading dimensions of one attention problem, folded to the three that kernels address by strides.

    ``group`` query heads share a key head: query head h, along the last leading dimension, uses key head h // group.
    """

    def __init__(self, query: torch.Tensor, key: torch.Tensor | None = None) -> None:
        self.lead = query.shape[:-2]
        self.count = math.prod(self.lead)
        self.group = query.shape[-3] // key.shape[-3] if key is not None and self.lead else 1
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
            x = x.reshape(*self.folded[:2], *x.shape[-3:])
        addressable = x.stride(-2) <= _MAX_ROW_STRIDE  # offsets within a tile are 32-bit
        return x if x.stride(-1) == 1 and addressable else x.contiguous()

    def unfold(self, x: torch.Tensor) -> torch.Tensor:
        """Undoes :meth:`fold` on an output."""
        return x.view(*self.lead[:-1], *x.shape[-3:]) if len(self.lead) > 3 else x

    def fold_broadcast(self, x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        """What broadcasts to (*lead, *sizes), as (·, lead1, lead2, *sizes) with strides of 0 where it does."""
        for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
            if size > 1 and stride == 0:  # reshape() would write out repetitions
                x = x.narrow(dim, 0, 1)
        folded = self.fold_shape(x.shape, len(sizes))
        if folded.numel() != x.numel():
            x = x.expand(*self.lead[:-2], *folded[1:])
        return x.reshape(folded).expand(*self.folded, *sizes)

    def fold_shape(self, shape: torch.Size, trailing: int) -> torch.Size:
        """Shape, with three leading dimensions before the ``trailing`` last, of what broadcasts to all heads.

        It has more elements only where some of the dimensions that are folded into the first one broadcast.
        """
        outer, inner = shape[: -2 - trailing], shape[-2 - trailing :]
        padding = (1,) * (2 + trailing - len(inner))
        first = 1 if math.prod(outer) == 1 else self.folded[0]
        return torch.Size((first, *padding, *inner))

    def splits(self, q: torch.Tensor, n_k: int, tile: int = 128, occupancy: int = 2) -> int:
        """Programs among which a key tile's query heads are divided: more than one only where a GPU would idle.

        Args:
            q: for the device.
            n_k: number of keys.
            tile: keys of a program.
            occupancy: programs a multiprocessor that keep it busy to the end.
        """
        if self.group == 1:
            return 1
        programs = self.count // self.group * cdiv(n_k, tile)
        wanted = occupancy * _multiprocessors(q.device)
        divisors = (n for n in range(1, self.group + 1) if self.group % n == 0)
        return next((n for n in divisors if n * programs >= wanted), self.group)

    def new_key_matrix(self, like: torch.Tensor, splits: int) -> torch.Tensor:
        """Uninitialised output like K or V; with splits, one float32 part a program, to be summed by :meth:`merged`."""
        if splits == 1:
            return new_matrix(like, like.shape[-1])
        *outer, key_heads, n_k, width = like.shape
        return like.new_empty((*outer, key_heads * splits, n_k, width), dtype=torch.float32)

    def merged(self, parts: torch.Tensor | None, dtype: torch.dtype, splits: int) -> torch.Tensor | None:
        """An output of :meth:`new_key_matrix`, unfolded."""
        if parts is None:
            return None
        if splits > 1:
            parts = parts.unflatten(-3, (-1, splits)).sum(-3).to(dtype)
        return self.unfold(parts)

    def new_row_vector(self, like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Uninitialised (..., N) for the N rows of a folded matrix."""
        return like.new_empty((*self.lead, like.shape[-2]), dtype=dtype)

    def strides(self, *matrices: torch.Tensor | None) -> tuple[tuple[int, ...], ...]:
        pad = (0,) * max(0, 3 - len(self.lead))
        return tuple((0, 0, 0, 0) if x is None else pad + x.stride()[:-1] for x in matrices)

    def grid(self, tiles: int, heads: int | None = None) -> tuple[int, int]:
        """Flat grid over heads (by default, of the query) × tiles, spilling from axis x to y past 2³¹ − 1 programs."""
        programs = (self.count if heads is None else heads) * tiles
        return min(programs, _MAX_GRID_X), cdiv(programs, _MAX_GRID_X)


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


def cdiv(n: int, size: int) -> int:
    """⌈n / size⌉. (Triton's also serves in kernels, and takes longer than the rest of what counts tiles.)"""
    return -(-n // size)


@functools.cache
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
    score: Score = PLAIN,
    grid: Callable[[Config], tuple[int, int]] | None = None,
    **constants: Any,
) -> None:
    """Launches one sweep: a program per head and tile of query rows, or, where ``name`` ends in "keys", per key head,
    split of its query heads (the constant SPLITS) and tile of keys.

    Args:
        kernel: Triton function of (*arguments, score, lead1, lead2, tiles, heads, n_q, n_k, scale, constants…).
        name: its entry in the table of launch settings.
        lengths, widths: (Nq, Nk) and (d, dv).
        arguments: the tensors, the query first, then their strides.
        score: what else acts on the scores.
        grid: (tiles, heads) of another division into programs.
        constants: further compile-time arguments.
    """
    d, dv = widths
    q = arguments[0]
    over_keys = name.endswith("keys")
    absent = tuple(x is None for x in (*arguments, *score))

    def attempt(config: Config, lengths: tuple[int, int]) -> None:
        n_q, n_k = lengths
        ragged = {"RAGGED": n_q % config.rows != 0} if over_keys else {}
        if grid is not None:
            tiles, count = grid(config)
        elif over_keys:
            tiles, count = cdiv(n_k, config.cols), heads.count // heads.group * constants["SPLITS"]
        else:
            tiles, count = cdiv(n_q, config.rows), heads.count
        with torch.cuda.device_of(q):
            what = score
            if over_keys and score.start is not None:
                what = row_intervals(heads, score, lengths, config.rows, config.cols)
            kernel[heads.grid(tiles, count)](
                *arguments, what.argument(), *heads.folded[1:], tiles, count, n_q, n_k, spec.scale,
                D=d, DV=dv, BLOCK_D=block(d), BLOCK_DV=block(dv), ROWS=config.rows, COLS=config.cols,
                CAUSAL=spec.causal, PRECISION=_dot_precision(q, spec), GROUP=heads.group, SOFTCAP=spec.softcap,
                DROPOUT=dropout_threshold(spec.dropout), **ragged, **constants,
                num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip

    problem = (name, widths, str(q.dtype), spec.precision, spec.softcap is None, absent)
    key = (q.device, *problem)
    config = _fitting.get(key)
    if config is None:
        config = settings(name, max(block(d), block(dv)), q.dtype)
        if autotune.enabled() and q.is_cuda and grid is None:
            # Strides stay those of the whole problem, whose beginning is timed; its outputs are written again below.
            short = (min(lengths[0], autotune.LENGTH), min(lengths[1], autotune.LENGTH))
            config = autotune.tuned(problem, config, lambda c: attempt(c, short), q.device)
    while True:
        try:
            attempt(config, lengths)
        except OutOfResources:  # a GPU with less shared memory than the table was measured on
            smaller = config.smaller()
            if smaller is None:
                raise
            config = smaller
        else:
            _fitting[key] = config
            return


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


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
    ("bias_gradient", 2, 64): Config(64, 64, 4, 2),
    ("bias_gradient", 2, 128): Config(64, 64, 8, 2),
    ("bias_gradient", 2, 256): Config(32, 32, 8, 1),
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
    ("bias_gradient", 4, 64): Config(32, 32, 4, 1),
    ("bias_gradient", 4, 128): Config(32, 32, 8, 1),
    ("bias_gradient", 4, 256): Config(16, 16, 8, 1),
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
