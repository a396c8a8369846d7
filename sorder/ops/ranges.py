"""Row ranges: which interval of keys each query row sees, from positions, windows, padding and documents."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """For every query row (..., Nq), int64: the queries and the keys of its document, as half-open intervals."""

    query_start: Tensor
    query_stop: Tensor
    key_start: Tensor
    key_stop: Tensor


def is_readable(x: Tensor) -> bool:
    """Whether looking at values costs the host nothing: on the CPU, and not fake, compiled or under a transform."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.device.type != "cpu":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def check_boundaries(cu: Tensor, tokens: int, name: str, side: str) -> None:
    """ValueError unless the boundaries ``cu`` (D + 1), which are readable, ascend from 0 to ``tokens`` at most."""
    ends = cu.tolist()
    if ends[0] != 0:
        got = f"a first boundary of {ends[0]}"
    elif ends[-1] > tokens:
        got = f"a last boundary of {ends[-1]}"
    else:
        falls = next((i for i in range(1, len(ends)) if ends[i] < ends[i - 1]), None)
        if falls is None:
            return
        got = f"{ends[falls]} behind {ends[falls - 1]}"
    raise ValueError(f"{name} must ascend from 0 to the number of {side} tokens, {tokens}, at most; got {got}")


def of_cu_seqlens(cu_q: Tensor, cu_k: Tensor, n_q: int) -> Documents:
    """Documents with boundaries ``cu`` (D + 1), ascending from 0; rows behind the last one see nothing.

    (Which boundaries that nothing looks at may leave, see :func:`check_boundaries`.)
    """
    rows = torch.arange(n_q, device=cu_q.device)
    if cu_q.shape[0] == 1:
        nothing = torch.zeros_like(rows)
        return Documents(nothing, nothing, nothing, nothing)
    cu_q, cu_k = cu_q.long(), cu_k.long()
    # Under vmap both must have the mapped dimension in memory, or searchsorted warns of copies of its own.
    document = torch.searchsorted(cu_q[1:].clone(), rows + torch.zeros_like(cu_q[:1]), right=True)
    inside = document < cu_q.shape[0] - 1
    document = document.clamp(max=cu_q.shape[0] - 2)
    q_start, q_stop, k_start, k_stop = (x[document] for x in (cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]))
    return Documents(q_start, q_stop, k_start, torch.where(inside, k_stop, k_start))


def of_ids(ids_q: Tensor, ids_k: Tensor) -> tuple[Documents, Tensor]:
    """Documents by id (..., N): the hull of the tokens that carry a row's id, and whether all hulls are unbroken."""
    q_start, q_stop, _ = _hull(ids_q, ids_q)
    k_start, k_stop, count = _hull(ids_q, ids_k)
    return Documents(q_start, q_stop, k_start, k_stop), (k_stop - k_start == count).all()


def _hull(wanted: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(first, last + 1, number) of the positions in ``ids`` that hold each of ``wanted``; zeros if there is none."""
    lead = torch.broadcast_shapes(wanted.shape[:-1], ids.shape[:-1])
    wanted, ids = wanted.expand(*lead, -1).contiguous(), ids.expand(*lead, -1)
    order, position = ids.sort(dim=-1, stable=True)
    order = order.contiguous()  # a sort keeps the strides, and searchsorted warns of such a copy of its own
    low = torch.searchsorted(order, wanted)
    high = torch.searchsorted(order, wanted, right=True)
    found = high > low
    start = position.gather(-1, low.clamp(max=ids.shape[-1] - 1))
    stop = position.gather(-1, (high - 1).clamp(min=0)) + 1
    return torch.where(found, start, 0), torch.where(found, stop, 0), high - low


def of_padding(real: Tensor) -> tuple[Tensor, Tensor]:
    """Hull (start, stop), each (...), of the keys that are True in (..., Nk)."""
    indices = torch.arange(real.shape[-1], device=real.device)
    start = torch.where(real, indices, real.shape[-1]).amin(-1)
    return start, torch.where(real, indices + 1, 0).amax(-1)


def intersected(
    start: Tensor | int, stop: Tensor | int, n_q: int, n_k: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Both ends as int32 (..., Nq), clamped to the keys."""
    ends = (torch.as_tensor(x, device=device).clamp(0, n_k).to(torch.int32) for x in (start, stop))
    return tuple(x if x.dim() else x.expand(n_q) for x in ends)
