"""Host side of the Hopper kernels: which problems they take, bulk-copy descriptors, measured launch settings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sorder.kernels import launch, tiles
from sorder.kernels.spec import AttentionSpec

SIZES = (*tiles.SIZES, "row_tiles", "zero")
"""Arguments on whose values no kernel is specialised: a new length never compiles anew."""

# Measured on an H200; keyed on the kernel and the padded head width, never on the length.
_SETTINGS: dict[tuple[str, int], launch.Config] = {
    ("tangent", 64): launch.Config(64, 64, 4, 2),
    ("tangent", 128): launch.Config(128, 64, 8, 2),
    ("forward_and_tangent", 64): launch.Config(64, 64, 4, 2),
    ("forward_and_tangent", 128): launch.Config(128, 32, 8, 4),
    ("backward_tangent", 64): launch.Config(64, 64, 4, 2),
    ("backward_tangent", 128): launch.Config(32, 128, 8, 2),
    ("backward_tangent_dual", 64): launch.Config(64, 64, 4, 2),
    ("backward_tangent_dual", 128): launch.Config(32, 128, 8, 2),
    ("backward_and_tangent", 64): launch.Config(32, 64, 4, 2),
    ("backward_tangent_keys", 64): launch.Config(64, 64, 4, 2),
    ("backward_tangent_keys", 128): launch.Config(32, 64, 4, 2),
    ("backward_tangent_dual_keys", 64): launch.Config(64, 64, 4, 2),
    ("backward_tangent_dual_keys", 128): launch.Config(32, 128, 8, 2),
    ("backward_tangent_queries", 64): launch.Config(64, 64, 4, 2),
    ("backward_tangent_queries", 128): launch.Config(128, 64, 8, 2),
    ("backward_tangent_dual_queries", 64): launch.Config(64, 64, 4, 2),
    ("backward_tangent_dual_queries", 128): launch.Config(128, 32, 8, 3),
}


def block(q: torch.Tensor, v: torch.Tensor) -> int:
    """Padded head width, one for Q and V: 64 or 128."""
    return 64 if max(q.shape[-1], v.shape[-1]) <= 64 else 128


def settings(name: str, q: torch.Tensor, v: torch.Tensor) -> launch.Config:
    return _SETTINGS[name, block(q, v)]


class Descriptors:
    """Bulk-copy descriptors of the tensors of one call, each made once for every height of its tiles.

    Args:
        heads: the leading dimensions.
        width: padded head width; rows and columns beyond the end of a matrix read 0.
    """

    def __init__(self, heads: launch.Heads, width: int) -> None:
        self._heads, self._width = heads, width
        self._made: dict[tuple[int, int], TensorDescriptor] = {}

    def matrices(self, rows: int, *matrices: torch.Tensor | None) -> list[TensorDescriptor | None]:
        """Of tiles of ``rows`` rows of folded matrices."""
        return [None if x is None else self._once(self._matrix, x, rows) for x in matrices]

    def vectors(self, rows: int, *vectors: torch.Tensor) -> list[TensorDescriptor]:
        """Of pieces of contiguous float32 row vectors (…, N).

        Beyond the end they read 0: a row of zeros in Q, Q̇, dO and dȮ adds nothing whatever its L is.
        """
        return [self._once(self._vector, x, rows) for x in vectors]

    def pair(self, rows: int, x: torch.Tensor, tx: torch.Tensor) -> TensorDescriptor:
        """Of a tile of ``rows`` rows of ``x`` above that of ``tx``, which one copy brings: they are stacked first."""
        both = torch.stack((x, tx)).view(2, self._heads.count, *x.shape[-2:])
        template = _pair_template(x.dtype, self._width, rows)
        return _filled(template, both, list(both.shape), list(both.stride()), both)

    def pieces(self, x: torch.Tensor) -> TensorDescriptor:
        """Of the rows of a contiguous float32 matrix."""
        rows, size = x.shape
        return _filled(_vector_template(size), x, [rows, size], [size, 1], x)

    def _once(
        self, make: Callable[[torch.Tensor, int], TensorDescriptor], x: torch.Tensor, rows: int
    ) -> TensorDescriptor:
        key = (id(x), rows)  # the descriptor keeps x alive
        if key not in self._made:
            self._made[key] = make(x, rows)
        return self._made[key]

    def _matrix(self, x: torch.Tensor, rows: int) -> TensorDescriptor:
        original = x
        lead = list(zip(x.shape[:-1], x.stride(), strict=False))
        if x.data_ptr() % 16 or any((s % 8 or not s) and n > 1 for n, s in lead):
            x = x.contiguous()
            lead = list(zip(x.shape[:-1], x.stride(), strict=False))
        pad = 4 - len(lead)
        shape = [1] * pad + list(x.shape)
        strides = [8] * pad + [s if n > 1 else 8 for n, s in lead] + [1]  # PyTorch's is arbitrary at a size of 1
        return _filled(_matrix_template(x.dtype, self._width, rows), x, shape, strides, original)

    def _vector(self, x: torch.Tensor, rows: int) -> TensorDescriptor:
        original = x
        x = x.view(self._heads.count, x.shape[-1])
        if x.shape[-1] % 4:  # rows must start at multiples of 16 bytes
            x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 4))
        return _filled(_vector_template(rows), x, list(x.shape), list(x.stride()), original)


def _filled(
    template: TensorDescriptor, x: torch.Tensor, shape: list[int], strides: list[int], source: torch.Tensor
) -> TensorDescriptor:
    """A descriptor like ``template``, without the checks of its constructor, which take longer than a launch."""
    descriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(vars(template), base=x, shape=shape, strides=strides, source=source)
    return descriptor


@functools.cache
def _matrix_template(dtype: torch.dtype, width: int, rows: int) -> TensorDescriptor:
    tile = [1, 1, 1, rows, width]
    layout = gl.NVMMASharedLayout.get_default_for(tile, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
    return TensorDescriptor(torch.empty(tile, dtype=dtype), tile, [8, 8, 8, 8, 1], tile, layout)


@functools.cache
def _pair_template(dtype: torch.dtype, width: int, rows: int) -> TensorDescriptor:
    tile = [2, 1, rows, width]
    layout = gl.NVMMASharedLayout.get_default_for(tile, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
    return TensorDescriptor(torch.empty(tile, dtype=dtype), tile, [8, 8, 8, 1], tile, layout)


@functools.cache
def _vector_template(rows: int) -> TensorDescriptor:
    return TensorDescriptor(torch.empty(1, rows), [1, rows], [rows, 1], [1, rows], gl.NVMMASharedLayout(0, 32, 2))


def run(
    kernel: Any, heads: launch.Heads, config: launch.Config, q: torch.Tensor, k: torch.Tensor,
    spec: AttentionSpec, arguments: tuple[Any, ...], *, width: int, over_keys: bool = False, splits: int = 1,
    **constants: Any,
) -> None:  # fmt: skip
    """Launches one sweep, a program per query head and tile of rows, or per key head and tile of keys.

    Args:
        kernel: Gluon function of (*arguments, lead1, lead2, heads, tiles, n_q, n_k, zero, scale, constants…).
        config: its launch settings.
        q, k: for the lengths and the device.
        arguments: descriptors, tensors and strides.
        width: padded head width.
        over_keys: the sweep's programs own tiles of keys.
        splits: of such a sweep, programs among which a key head's query heads are divided.
    """
    programs, (_, lead1, lead2) = heads.count, heads.folded
    tiles = launch.cdiv(q.shape[-2], config.rows)
    if over_keys:
        programs, lead2 = programs // heads.group * splits, lead2 // heads.group * splits
        tiles = launch.cdiv(k.shape[-2], config.cols)
        constants["SPLITS"] = splits
    with torch.cuda.device_of(q):
        kernel[heads.grid(tiles, programs)](
            *arguments, lead1, lead2, programs, tiles, q.shape[-2], k.shape[-2], 0, spec.scale,
            D=width, ROWS=config.rows, COLS=config.cols, STAGES=config.stages, CAUSAL=spec.causal, GROUP=heads.group,
            num_warps=config.warps, **constants,
        )  # fmt: skip
