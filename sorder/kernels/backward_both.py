"""B and T in one sweep, where a kernel does both: see ``sorder.kernels.hopper.backward_both``."""

from __future__ import annotations

from typing import Any

import torch

from sorder.kernels.hopper import dispatch
from sorder.kernels.mask import Visibility
from sorder.kernels.spec import AttentionSpec


def serves(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, vis: Visibility | None,
    needed: tuple[torch.Tensor | None, ...], spec: AttentionSpec,
) -> bool:  # fmt: skip
    """Whether :func:`backward_and_tangent` takes this, with all ``needed`` tensors there: causal, at width 64 only.

    Wider, four accumulators leave no room for tiles that keep the tensor cores busy. Without a mask, where cuDNN's B is
    at its best, B and T apart take as long.
    """
    narrow = max(q.shape[-1], v.shape[-1]) <= 64
    if not (narrow and spec.causal) or torch.are_deterministic_algorithms_enabled():
        return False
    return dispatch.serves(q, k, v, bias, vis, spec, *needed)


def backward_and_tangent(*args: Any) -> tuple[torch.Tensor, ...]:
    """(dQ, dK, dV, dQ̇, dK̇, dV̇) of (q, k, v, o, lse, dO, q̇, k̇, v̇, Ȯ, L̇, what rounding Ȯ lost, dȮ or ``None``, spec)."""
    from sorder.kernels.hopper.backward_both import backward_and_tangent as on_hopper

    return on_hopper(*args)
