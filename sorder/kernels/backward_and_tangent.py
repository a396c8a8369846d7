"""B and T in one sweep, where a kernel does both: see ``sorder.kernels.hopper.backward_and_tangent``."""

from __future__ import annotations

import torch

from sorder.kernels.hopper import dispatch
from sorder.kernels.mask import Visibility
from sorder.kernels.spec import AttentionSpec


def serves(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, vis: Visibility | None,
    spec: AttentionSpec, *needed: torch.Tensor | None,
) -> bool:  # fmt: skip
    """Whether :func:`backward_and_tangent` takes this, with all ``needed`` tensors there: causal, at width 64 only.

    Wider, four accumulators leave no room for tiles that keep the tensor cores busy. Without a mask, where cuDNN's B is
    at its best, B and T apart take as long.
    """
    narrow = max(q.shape[-1], v.shape[-1]) <= 64
    if not (narrow and spec.causal) or torch.are_deterministic_algorithms_enabled():
        return False
    return dispatch.serves(q, k, v, bias, vis, spec, *needed)


def backward_and_tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
    tq: torch.Tensor, tk: torch.Tensor, tv: torch.Tensor, to: torch.Tensor, tl: torch.Tensor, to_low: torch.Tensor,
    tdo: torch.Tensor | None, spec: AttentionSpec,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(dQ, dK, dV, dQ̇, dK̇, dV̇) where :func:`serves`; ``to_low`` is the part of Ȯ that its rounding lost."""
    from sorder.kernels.hopper.backward_and_tangent import backward_and_tangent as on_hopper

    return on_hopper(q, k, v, o, lse, do, tq, tk, tv, to, tl, to_low, tdo, spec)
