"""A step that divides by a diagonal, on many tensors in one launch; before it, a search for gradients not finite.

    m ← m + take·(g − m)        p ← keep·p − lr·u        u = clip(m / max(scale·h, ε), 1)       (Sophia)
                                                         u = m / ((scale·√h)^power + ε)         (AdaHessian)

The search reads g, the step reads p, g, m and h and writes p and m: seven passes over memory, as many as AdamW's,
though no tensor changes before all gradients are known to be finite. The arithmetic is in float32, and p and m are
rounded once. Tensors are found through tables of addresses, so that a model's parameters need one launch whatever
their number. The search leaves its finding on the device, where the step obeys it, and in memory of the host: nothing
is copied between the two kernels, and the host learns of it while the step runs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sorder.kernels.launch import INTERPRETED

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_TABLE_ROWS = tl.constexpr(4)


class Tiling(NamedTuple):
    """Launch settings of one kernel: elements of a program, and its warps."""

    block: int
    warps: int


# Of a step, few elements a thread, so that many programs overlap: each waits for its place, then for addresses, then
# for data. In the interpreter small, so that short tests have tensors of several blocks.
SEARCH = Tiling(32, 1) if INTERPRETED else Tiling(8192, 8)
STEP = Tiling(32, 1) if INTERPRETED else Tiling(2048, 8)


@triton.jit
def _place(TABLE, PLACES, program, tensors, BLOCK: tl.constexpr):
    """A program's tensor, its first element there, and how many the tensor has."""
    tensor = tl.load(PLACES + 2 * program)
    first = tl.load(PLACES + 2 * program + 1).to(tl.int64) * BLOCK
    return tensor, first, tl.load(TABLE + (_TABLE_ROWS - 1) * tensors + tensor)


@triton.jit
def _elements(ADDRESS, index, TYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    pointers = tl.load(ADDRESS).to(tl.pointer_type(TYPE)) + index
    if ALIGNED:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, 16), BLOCK)
    return pointers


@triton.jit
def _search(at_g, exists, FLAG, ON_HOST, number, BLOCK: tl.constexpr):
    g = tl.load(at_g, mask=exists, other=None if exists is None else 0.0).to(tl.float32)
    if tl.sum((tl.abs(g) < float("inf")).to(tl.int32), 0) < BLOCK:
        tl.store(FLAG, number)
        tl.store(ON_HOST, number)


@triton.jit(do_not_specialize=["number"])
def search_kernel(
    TABLE, GRADIENTS, PLACES, FLAG, ON_HOST, number, tensors,
    G_TYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor, first, count = _place(TABLE, PLACES, tl.program_id(0), tensors, BLOCK)
    index = first + tl.arange(0, BLOCK)
    at_g = _elements(GRADIENTS + tensor, index, G_TYPE, ALIGNED, BLOCK)
    if first + BLOCK <= count:  # without a mask, loads are of 16 bytes
        _search(at_g, None, FLAG, ON_HOST, number, BLOCK)
    else:
        _search(at_g, index < count, FLAG, ON_HOST, number, BLOCK)


@triton.jit
def _direction(m, h, scale, eps, POWER: tl.constexpr):
    if POWER is None:
        u = tl.minimum(tl.maximum(tl.div_rn(m, tl.maximum(scale * h, eps)), -1.0), 1.0)
    elif POWER == 0.0:
        u = tl.div_rn(m, 1.0 + eps + tl.zeros_like(m))
    elif POWER == 1.0:
        u = tl.div_rn(m, scale * tl.sqrt_rn(h) + eps)
    else:
        u = tl.div_rn(m, tl.exp2(POWER * tl.log2(scale * tl.sqrt_rn(h))) + eps)
    return u


@triton.jit
def _step(
    at_p, at_g, at_m, at_h, exists, found, lr, keep, take, scale, eps,
    P_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr, POWER: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    # Of these, nothing is read again before the next step; the end of g is still in the cache from the search.
    p = tl.load(at_p, mask=exists, eviction_policy="evict_first").to(tl.float32)
    g = tl.load(at_g, mask=exists).to(tl.float32)
    m = tl.load(at_m, mask=exists, eviction_policy="evict_first").to(tl.float32)
    h = tl.load(at_h, mask=exists, eviction_policy="evict_first").to(tl.float32)
    if MAXIMIZE:
        g = -g
    m += take * (g - m)
    u = _direction(m, h, scale, eps, POWER)
    if not found:
        tl.store(at_p, (p * keep - lr * u).to(P_TYPE), mask=exists)
        tl.store(at_m, m.to(STATE_TYPE), mask=exists)


@triton.jit(do_not_specialize=["number"])
def step_kernel(
    TABLE, GRADIENTS, PLACES, FLAG, number, tensors, lr, keep, take, scale, eps,
    P_TYPE: tl.constexpr, G_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr, POWER: tl.constexpr,
    MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Nothing but the stores waits for the flag. The order is the search's backwards, for the cache.
    found = tl.load(FLAG) == number
    tensor, first, count = _place(TABLE, PLACES, tl.num_programs(0) - 1 - tl.program_id(0), tensors, BLOCK)
    index = first + tl.arange(0, BLOCK)
    at_p = _elements(TABLE + tensor, index, P_TYPE, ALIGNED, BLOCK)
    at_m = _elements(TABLE + tensors + tensor, index, STATE_TYPE, ALIGNED, BLOCK)
    at_h = _elements(TABLE + 2 * tensors + tensor, index, STATE_TYPE, ALIGNED, BLOCK)
    at_g = _elements(GRADIENTS + tensor, index, G_TYPE, ALIGNED, BLOCK)
    if first + BLOCK <= count:
        _step(at_p, at_g, at_m, at_h, None, found, lr, keep, take, scale, eps, P_TYPE, STATE_TYPE, POWER, MAXIMIZE)
    else:
        exists = index < count
        _step(at_p, at_g, at_m, at_h, exists, found, lr, keep, take, scale, eps, P_TYPE, STATE_TYPE, POWER, MAXIMIZE)


class Batch:
    """Contiguous tensors of one launch: of one device, and p, m and h of one dtype each.

    It is made once and used for many steps; :meth:`set_gradients` comes before each.
    """

    def __init__(self, params: Sequence[Tensor], m: Sequence[Tensor], h: Sequence[Tensor]) -> None:
        self.params, self.m, self.h = list(params), list(m), list(h)
        self.device = params[0].device
        self.gradients: list[Tensor] = []
        self._numels = tuple([p.numel() for p in params])
        self._addresses = self._present_addresses()
        self._table = _to_device([*self._addresses, *self._numels], self.device)
        self._of_gradients: list[int] = []
        self._gradients_table = self._table

    @property
    def in_place(self) -> bool:
        """Whether p, m and h are where they were, and still contiguous."""
        all_of_them = (*self.params, *self.m, *self.h)
        return self._present_addresses() == self._addresses and all(map(Tensor.is_contiguous, all_of_them))

    def _present_addresses(self) -> list[int]:
        return [*map(Tensor.data_ptr, self.params), *map(Tensor.data_ptr, self.m), *map(Tensor.data_ptr, self.h)]

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Take these for one step, all of one dtype; one that is not contiguous is copied."""
        self.gradients = [g if g.is_contiguous() else g.contiguous() for g in gradients]
        addresses = list(map(Tensor.data_ptr, self.gradients))
        if addresses != self._of_gradients:  # often they are those of the step before
            self._of_gradients = addresses
            self._gradients_table = _to_device(addresses, self.device)
            self._aligned = all(address % 16 == 0 for address in (*addresses, *self._addresses))

    def search(self, flag: Flag) -> None:
        """Have ``flag`` raised if a gradient is not finite."""
        places = _places(self._numels, SEARCH.block, self.device)
        if len(places):
            search_kernel[(len(places),)](
                self._table, self._gradients_table, places, flag.on_device, flag.on_host, flag.number,
                len(self.params), G_TYPE=TYPES[self.gradients[0].dtype], ALIGNED=self._aligned,
                BLOCK=SEARCH.block, num_warps=SEARCH.warps,
            )  # fmt: skip

    def step(
        self, flag: Flag, *, lr: float, keep: float, take: float, scale: float, eps: float, power: float | None = None,
        maximize: bool = False,
    ) -> None:  # fmt: skip
        """Take the step in place and let go of the gradients; nothing happens if ``flag`` is up.

        ``power`` is None for Sophia's u, and a number for AdaHessian's.
        """
        places = _places(self._numels, STEP.block, self.device)
        if len(places):
            step_kernel[(len(places),)](
                self._table, self._gradients_table, places, flag.on_device, flag.number, len(self.params),
                lr, keep, take, scale, eps,
                P_TYPE=TYPES[self.params[0].dtype], G_TYPE=TYPES[self.gradients[0].dtype],
                STATE_TYPE=TYPES[self.m[0].dtype], POWER=power,
                MAXIMIZE=maximize, ALIGNED=self._aligned, BLOCK=STEP.block, num_warps=STEP.warps,
            )  # fmt: skip
        self.gradients = []
        # Autograd has to know that these changed, as by any in-place operation.
        torch.autograd.graph.increment_version([*self.params, *self.m])


class Flag:
    """Whether some gradient is not finite: known to the device first. For one optimizer; every step has a number."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.number = 1
        self.on_device = torch.zeros((), dtype=torch.int32, device=device)
        # Pinned memory, which the kernel writes to itself.
        self.on_host = torch.zeros((), dtype=torch.int32, pin_memory=on_gpu)
        self._event = torch.cuda.Event() if on_gpu else None

    def lower(self) -> None:
        """For a new step: what was raised before no longer counts."""
        self.number += 1

    def searched(self) -> None:
        """All searches of this step are launched."""
        if self._event is not None:
            self._event.record()

    def raised(self) -> bool:
        """The finding, on the host. Waits for the searches, not for what was launched after them."""
        if self._event is not None:
            self._event.synchronize()
        return int(self.on_host) == self.number


def fused_step(launches: Sequence[tuple[Batch, Mapping[str, Any]]], flag: Flag, maximize: bool = False) -> bool:
    """Take the step of all batches, each with its options; False, and nothing has changed, if a gradient is not finite.

    All are on the device of ``flag``.
    """
    flag.lower()
    with torch.cuda.device_of(flag.on_device):
        for batch, _ in launches:
            batch.search(flag)
        flag.searched()
        # Queued behind the search, they obey its finding before the host knows it.
        for batch, options in launches:
            batch.step(flag, **options, maximize=maximize)
    return not flag.raised()


def _to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    # From pinned memory the copy waits for nothing, and the allocator keeps the source until it is done.
    table = torch.tensor(numbers, dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@functools.lru_cache(maxsize=32)
def _places(numels: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    """(programs, 2), int32: tensor and block within it of every program."""
    blocks = torch.tensor([triton.cdiv(n, block) for n in numels], dtype=torch.int64)
    tensor = torch.repeat_interleave(torch.arange(len(numels)), blocks)
    number = torch.arange(len(tensor)) - (blocks.cumsum(0) - blocks)[tensor]
    return torch.stack([tensor, number], 1).to(torch.int32).to(device)
