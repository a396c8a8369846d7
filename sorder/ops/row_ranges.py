"""Masks and paddings that are given element by element: row ranges where every row sees one interval of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sorder.ops.constants import constant
from sorder.ops.mask import Mask

_BLOCK = 2**24
"""Elements of a mask that are held at once."""


def mask_from_rows(
    visible: Callable[[int, int], Tensor], n_q: int, n_k: int, lead: int = 1, multiple: int = 1
) -> Mask | Tensor:
    """A mask from what its rows show, evaluated a block of rows at a time.

    Args:
        visible: ``visible(first, last)`` is the boolean mask of these rows, (..., last − first, Nk), True where the
            query sees the key.
        n_q: number of rows Nq.
        n_k: number of keys Nk.
        lead: product of the leading dimensions of what ``visible`` returns.
        multiple: rows at which a block begins are multiples of this.

    Returns:
        A :class:`Mask` of row ranges if every row sees one interval of keys (or nothing), in memory linear in Nq;
        otherwise the whole boolean mask (..., Nq, Nk).
    """
    rows = max(1, _BLOCK // max(1, lead * n_k * multiple)) * multiple
    starts, stops = [], []
    for first in range(0, n_q, rows):
        block = visible(first, min(n_q, first + rows))
        rises = block[..., :1].sum(-1) + (block[..., 1:] & ~block[..., :-1]).sum(-1)
        if bool((rises > 1).any()):
            return torch.cat([visible(i, min(n_q, i + rows)) for i in range(0, n_q, rows)], -2)
        start = block.to(torch.uint8).argmax(-1)
        starts.append(start.int())
        stops.append((start + block.sum(-1)).int())
    start, stop = torch.cat(starts, -1), torch.cat(stops, -1)
    known = constant(start), constant(stop)
    return Mask(ranges=(start if known[0] is None else known[0], stop if known[1] is None else known[1]))


def padding_fields(real: Tensor) -> dict[str, Any]:
    """Fields of a :class:`Mask` for (B, Nk) keys, True where real: none if all are, two numbers a row if they adjoin.

    Looks at the values, on a GPU by one synchronisation; under a transform of ``real`` it does not.
    """
    known = constant(real)
    if known is None:
        return {"key_padding": real}
    with torch._C._DisableFuncTorch(), torch.no_grad():
        return _padding_fields(known)


def _padding_fields(real: Tensor) -> dict[str, Any]:
    count = real.sum(-1)
    start = real.to(torch.uint8).argmax(-1)
    last = torch.where(real, torch.arange(real.shape[-1], device=real.device), -1).amax(-1)
    facts = torch.stack([real.all(), (last < start + count).all(), (start == 0).all()])
    everything, adjoining, from_first = facts.tolist()
    if everything:
        return {}
    if not adjoining:
        return {"key_padding": real}
    stop = {"key_stop": start + count}
    return stop if from_first else {"key_start": start, **stop}
