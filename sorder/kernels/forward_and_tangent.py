"""F and J in one sweep, where a kernel does both: see ``sorder.kernels.hopper.forward_and_tangent``."""

from __future__ import annotations

import torch

from sorder.kernels.hopper import dispatch
from sorder.kernels.mask import Visibility
from sorder.kernels.spec import AttentionSpec


def serves(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, vis: Visibility | None,
    spec: AttentionSpec, *needed: torch.Tensor | None,
) -> bool:  # fmt: skip
    """Whether :func:`forward_and_tangent` takes this; otherwise two sweeps are as good, or must do.

    Float16 has too few exponents for weights above 1, which the sweep needs.
    """
    return q.dtype == torch.bfloat16 and dispatch.serves(q, k, v, bias, vis, spec, *needed)


def forward_and_tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    tq: torch.Tensor, tk: torch.Tensor, tv: torch.Tensor, spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(O, L, Ȯ, L̇, the part of Ȯ that its rounding loses)."""
    from sorder.kernels.hopper.forward_and_tangent import forward_and_tangent as on_hopper

    return on_hopper(q, k, v, tq, tk, tv, spec)
