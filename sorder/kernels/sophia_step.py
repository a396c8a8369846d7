"""Sophia's step between updates, on many tensors in one launch; before it, a search for gradients that are not finite.

    m ← m + (1 − β₁)(g − m)        p ← (1 − lr·decay)·p − lr·clip(m / max(γh, ε), 1)

A step reads p, g, m and h and writes p and m; its arithmetic is in float32, and p and m are rounded once. Tensors are
found through a table of addresses, so that a model's parameters need one launch whatever their number. The search
leaves its finding on the device, where the step obeys it: the host learns of it while the step runs, and a step that
must not happen has not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sorder.kernels.launch import INTERPRETED

_BLOCK = 32 if INTERPRETED else 4096  # small, so that short tests have tensors of several blocks
_WARPS = 8
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_PLAIN = (Tensor, torch.nn.Parameter)


@triton.jit
def _place(TABLE, PLACES, tensors, BLOCK: tl.constexpr):
    """This program's column of the table, its elements' numbers, and how many its tensor has."""
    program = tl.program_id(0).to(tl.int64)
    column = TABLE + tl.load(PLACES + 2 * program)
    first = tl.load(PLACES + 2 * program + 1).to(tl.int64) * BLOCK
    return column, first + tl.arange(0, BLOCK), first + BLOCK, tl.load(column + 4 * tensors)


@triton.jit
def _elements(ADDRESS, index, TYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    pointers = tl.load(ADDRESS).to(tl.pointer_type(TYPE)) + index
    if ALIGNED:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, 16), BLOCK)
    return pointers


@triton.jit
def _search(column, tensors, index, exists, FLAG, G_TYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    at_g = _elements(column + tensors, index, G_TYPE, ALIGNED, BLOCK)
    g = tl.load(at_g, mask=exists, other=None if exists is None else 0.0).to(tl.float32)
    if tl.sum((tl.abs(g) < float("inf")).to(tl.int32), 0) < BLOCK:
        tl.store(FLAG, 1)


@triton.jit
def search_kernel(TABLE, PLACES, FLAG, tensors, G_TYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    column, index, end, count = _place(TABLE, PLACES, tensors, BLOCK)
    if end <= count:  # without a mask, loads are of 16 bytes
        _search(column, tensors, index, None, FLAG, G_TYPE, ALIGNED, BLOCK)
    else:
        _search(column, tensors, index, index < count, FLAG, G_TYPE, ALIGNED, BLOCK)


@triton.jit
def _step(
    column, tensors, index, exists, lr, keep, take, gamma, eps,
    P_TYPE: tl.constexpr, G_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr,
    MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at_p = _elements(column, index, P_TYPE, ALIGNED, BLOCK)
    at_g = _elements(column + tensors, index, G_TYPE, ALIGNED, BLOCK)
    at_m = _elements(column + 2 * tensors, index, STATE_TYPE, ALIGNED, BLOCK)
    at_h = _elements(column + 3 * tensors, index, STATE_TYPE, ALIGNED, BLOCK)
    p = tl.load(at_p, mask=exists).to(tl.float32)
    g = tl.load(at_g, mask=exists).to(tl.float32)
    m = tl.load(at_m, mask=exists).to(tl.float32)
    h = tl.load(at_h, mask=exists).to(tl.float32)
    if MAXIMIZE:
        g = -g
    m += take * (g - m)
    u = tl.div_rn(m, tl.maximum(gamma * h, eps))
    u = tl.minimum(tl.maximum(u, -1.0), 1.0)
    tl.store(at_p, (p * keep - lr * u).to(P_TYPE), mask=exists)
    tl.store(at_m, m.to(STATE_TYPE), mask=exists)


@triton.jit
def step_kernel(
    TABLE, PLACES, FLAG, tensors, lr, keep, take, gamma, eps,
    P_TYPE: tl.constexpr, G_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr,
    MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if FLAG is not None:  # noqa: SIM102
        if tl.load(FLAG) != 0:
            return
    column, index, end, count = _place(TABLE, PLACES, tensors, BLOCK)
    if end <= count:
        _step(
            column,
            tensors,
            index,
            None,
            lr,
            keep,
            take,
            gamma,
            eps,
            P_TYPE,
            G_TYPE,
            STATE_TYPE,
            MAXIMIZE,
            ALIGNED,
            BLOCK,
        )
    else:
        exists = index < count
        _step(
            column,
            tensors,
            index,
            exists,
            lr,
            keep,
            take,
            gamma,
            eps,
            P_TYPE,
            G_TYPE,
            STATE_TYPE,
            MAXIMIZE,
            ALIGNED,
            BLOCK,
        )


def batches(
    params: Sequence[Tensor], gradients: Sequence[Tensor], m: Sequence[Tensor], h: Sequence[Tensor]
) -> list[Batch] | None:
    """Launches for these tensors; None unless all are plain, contiguous (gradients: strided), and on one device."""
    # For every step this runs over every parameter: whatever it asks of a tensor counts.
    device = params[0].get_device()
    alike: dict[tuple[torch.dtype, ...], list[tuple[Tensor, ...]]] = {}
    for four in zip(params, gradients, m, h, strict=True):
        p, g, a, b = four
        dtypes = (p.dtype, g.dtype, a.dtype, b.dtype)
        members = alike.get(dtypes)
        if members is None:
            if dtypes[2] is not dtypes[3] or not all(d in _TYPES for d in dtypes):
                return None
            members = alike[dtypes] = []
        plain = type(p) in _PLAIN and type(g) is Tensor and g.layout is torch.strided
        if not (plain and p.is_contiguous() and a.is_contiguous() and b.is_contiguous()):
            return None
        if not p.get_device() == a.get_device() == b.get_device() == device:  # a gradient is where its parameter is
            return None
        members.append(four)
    return [Batch(*zip(*members, strict=True)) for members in alike.values()]


class Batch:
    """Tensors of one launch, as :func:`batches` makes them; a gradient that is not contiguous is copied."""

    def __init__(
        self, params: Sequence[Tensor], gradients: Sequence[Tensor], m: Sequence[Tensor], h: Sequence[Tensor]
    ) -> None:
        self.params, self.m = params, m
        self.gradients = [g if g.is_contiguous() else g.contiguous() for g in gradients]
        self.device = params[0].device
        self.types = (_TYPES[params[0].dtype], _TYPES[gradients[0].dtype], _TYPES[m[0].dtype])
        numels = tuple([p.numel() for p in params])
        self.places = _places(numels, self.device)
        addresses = [t.data_ptr() for tensors in (params, self.gradients, m, h) for t in tensors]
        self.aligned = all(address % 16 == 0 for address in addresses)
        # Rows: addresses of p, g, m and h, and number of elements. From pinned memory the copy waits for nothing, and
        # the allocator keeps the source until it is done.
        table = torch.tensor([*addresses, *numels], dtype=torch.int64)
        self.table = table.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else table

    @property
    def programs(self) -> int:
        return len(self.places)


@functools.lru_cache(maxsize=16)
def _places(numels: tuple[int, ...], device: torch.device) -> Tensor:
    """(programs, 2), int32: tensor and block within it of every program. Kept, for a model's shapes do not change."""
    blocks = torch.tensor([triton.cdiv(n, _BLOCK) for n in numels], dtype=torch.int64)
    tensor = torch.repeat_interleave(torch.arange(len(numels)), blocks)
    block = torch.arange(len(tensor)) - (blocks.cumsum(0) - blocks)[tensor]
    return torch.stack([tensor, block], 1).to(torch.int32).to(device)


class NonFinite:
    """Whether some gradient of ``batches`` (of one device) is not finite: known to the device first."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        device = batches[0].device
        on_gpu = device.type == "cuda"
        self.flag = torch.zeros((), dtype=torch.int32, device=device)
        with torch.cuda.device_of(self.flag):
            for batch in batches:
                if batch.programs:
                    search_kernel[(batch.programs,)](
                        batch.table, batch.places, self.flag, len(batch.params),
                        G_TYPE=batch.types[1], ALIGNED=batch.aligned, BLOCK=_BLOCK, num_warps=_WARPS,
                    )  # fmt: skip
            self._on_host = torch.empty((), dtype=torch.int32, pin_memory=on_gpu).copy_(self.flag, non_blocking=True)
            self._sent = torch.cuda.Event() if on_gpu else None
            if self._sent is not None:
                self._sent.record()

    def found(self) -> bool:
        """The finding, on the host. Waits for the search, not for what was launched after it."""
        if self._sent is not None:
            self._sent.synchronize()
        return bool(self._on_host)


def sophia_step(
    batch: Batch, *, lr: float, beta1: float, gamma: float, eps: float, weight_decay: float,
    maximize: bool = False, unless: NonFinite | None = None,
) -> None:  # fmt: skip
    """Take the step in place; nothing happens if ``unless`` has found something."""
    if not batch.programs:
        return
    with torch.cuda.device_of(batch.table):
        step_kernel[(batch.programs,)](
            batch.table, batch.places, None if unless is None else unless.flag, len(batch.params),
            float(lr), 1.0 - lr * weight_decay, 1.0 - beta1, float(gamma), float(eps),
            P_TYPE=batch.types[0], G_TYPE=batch.types[1], STATE_TYPE=batch.types[2],
            MAXIMIZE=maximize, ALIGNED=batch.aligned, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    # Autograd has to know that these changed, as by any in-place operation.
    torch.autograd.graph.increment_version([*batch.params, *batch.m])
