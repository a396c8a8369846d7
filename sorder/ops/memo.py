"""Results of F and B that a recomputation asks for again, found by the bits of what went in.

Under ``jvp(grad(...))`` a checkpointed block is evaluated three or four times, and once or twice with its pullback. The
values of attention are the same each time; a :class:`Memo` hands over what the first time found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_MIN_SCORES = 2**30
"""Below this many scores, recomputing takes about as long as finding."""
_COLUMNS = 1 << 16
_AT_ONCE = 1 << 22  # elements of a temporary: 32 MiB

Key = tuple[Any, ...]


class Memo:
    """Results of one checkpointed call. They are its own: who asks gets a copy, or at last the tensors themselves."""

    def __init__(self) -> None:
        self._kept: dict[Key, tuple[Tensor, ...]] = {}

    def find(self, key: Key, last: bool) -> tuple[Tensor, ...] | None:
        """What was kept; forgotten if this is the ``last`` time."""
        if last:
            return self._kept.pop(key, None)
        entry = self._kept.get(key)
        return None if entry is None else tuple(x.clone() for x in entry)

    def keep(self, key: Key, results: tuple[Tensor, ...]) -> None:
        self._kept[key] = tuple(x.detach().clone() for x in results)

    def holds(self, name: str) -> bool:
        return any(key[0] == name for key in self._kept)

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def clear(self) -> None:
        """Forgets all, as the call's backward pass does at its end."""
        self._kept.clear()


_open: list[tuple[Memo, bool]] = []  # not by thread: autograd calls from its own, and what went in decides anyway


@contextmanager
def remembering(memo: Memo | None, last: bool = False) -> Iterator[None]:
    """Within, large attention is looked up in ``memo`` before it is computed; if ``last``, nothing more is kept."""
    if memo is None:
        yield
        return
    entry = (memo, last)
    _open.append(entry)
    try:
        yield
    finally:
        _open.remove(entry)


def remembered(name: str, last: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates an operator: within :func:`remembering` its results are kept, and found once more if ``last``."""

    def decorate(operator: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operator)
        def served(*args: Any) -> Any:
            place = where(name, args)
            if place is None:
                return operator(*args)
            memo, key, ends = place
            found = memo.find(key, last or ends)
            if found is None:
                found = tuple(operator(*args))
                if not ends:
                    memo.keep(key, found)
            return list(found) if last else found

        return served

    return decorate


def where(name: str, args: tuple[Any, ...]) -> tuple[Memo, Key, bool] | None:
    """Where the operator's result at ``args`` is kept, within :func:`remembering`, and whether nothing more is."""
    if not _open or not _worthwhile(args[0], args[1]):
        return None
    memo, ends = _open[-1]
    if ends and not memo.holds(name):  # hashes would be for nothing
        return None
    return memo, (name, *_key(args)), ends


def _worthwhile(q: Tensor, k: Tensor) -> bool:
    if q.shape[:-1].numel() * k.shape[-2] < _MIN_SCORES:
        return False
    return not (q.is_cuda and torch.cuda.is_current_stream_capturing())


def _key(args: tuple[Any, ...]) -> Key:
    """Everything but the entries of tensors, and two 64-bit hashes of these."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    facts = [(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x for x in args]
    return *facts, *torch.stack([h for x in tensors for h in _hashes(x)]).tolist()


def _hashes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Σ wᵢbᵢ mod 2⁶⁴ of the bits b of the entries, with two sets of fixed random odd weights w."""
    # Words of at most half the width of the sums: two signs that change would cancel at the top.
    words = {1: torch.uint8, 2: torch.int16}.get(x.element_size(), torch.int32)
    bits = x.detach().contiguous().view(-1).view(words)
    columns = min(_COLUMNS, max(1, bits.numel()))
    rows = torch.nn.functional.pad(bits, (0, -bits.numel() % columns)).view(-1, columns)
    sums = [bits.new_zeros((), dtype=torch.int64) for _ in range(2)]
    step = _AT_ONCE // columns
    for first in range(0, len(rows), step):
        some = rows[first : first + step]
        numbers = torch.arange(first, first + len(some), device=x.device) % _COLUMNS
        for i, (across, down) in enumerate(_weights(x.device)):
            sums[i] = sums[i] + ((some * across[:columns]).sum(1) * down[numbers]).sum()
    return sums[0], sums[1]


@functools.cache
def _weights(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    draws = [torch.randint(low, high, (_COLUMNS,), generator=generator) | 1 for _ in range(4)]
    return [(draws[i].to(device), draws[i + 1].to(device)) for i in (0, 2)]
