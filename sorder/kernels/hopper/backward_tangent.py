"""T on Hopper: in one sweep, which adds dQ̇ up in no determined order; under deterministic algorithms, or where only a
part is wanted, in a sweep for dK̇ and dV̇ and one for dQ̇, whose results are bitwise reproducible."""

from __future__ import annotations

from typing import Any

import torch

from sorder.kernels import launch
from sorder.kernels.hopper import host
from sorder.kernels.hopper.backward_tangent_keys import key_gradients
from sorder.kernels.hopper.backward_tangent_one_sweep import gradients
from sorder.kernels.hopper.backward_tangent_queries import query_gradient
from sorder.kernels.row_scalars import packed_row_scalars, row_scalars
from sorder.kernels.spec import AttentionSpec


def backward_tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    do: torch.Tensor, dl: torch.Tensor | None, tq: torch.Tensor, tk: torch.Tensor, tv: torch.Tensor,
    to: torch.Tensor, tl_: torch.Tensor, to_low: torch.Tensor | None, tdo: torch.Tensor | None,
    tdl: torch.Tensor | None, wanted: str, spec: AttentionSpec,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:  # fmt: skip
    """(dQ̇, dK̇, dV̇, None) of a problem that :func:`dispatch.serves`, with all three tangents and dO."""
    heads = launch.Heads(q, k)
    q, k, v, o, do, tq, tk, tv, to, to_low, tdo = heads.fold(q, k, v, o, do, tq, tk, tv, to, to_low, tdo)
    lse, dl, tl_, tdl = launch.row_vectors(lse, dl, tl_, tdl)
    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    if "q" in wanted and ("k" in wanted or "v" in wanted) and not torch.are_deterministic_algorithms_enabled():
        config = host.settings("backward_tangent" if tdo is None else "backward_tangent_dual", q, v)
        vectors = packed_row_scalars(heads, o, do, dl, lse, tl_, to, to_low, tdo, tdl, config.rows)
        dq, dk, dv = gradients(heads, q, k, v, do, tq, tk, tv, tdo, vectors, config, spec)
    else:
        delta, tdelta = row_scalars(heads, o, do, dl, to=to, to_low=to_low, tdo=tdo, tdl=tdl, second_order=True)
        of = host.Descriptors(heads, host.block(q, v))
        operands: tuple[Any, ...] = (heads, of, q, k, v, lse, do, tq, tk, tv, tl_, tdo, delta, tdelta, spec)
        dk, dv = key_gradients(*operands) if "k" in wanted or "v" in wanted else (None, None)
        dq = query_gradient(*operands) if "q" in wanted else None
    dq = None if dq is None else heads.unfold(dq)
    return dq, dk if "k" in wanted else None, dv if "v" in wanted else None, None
