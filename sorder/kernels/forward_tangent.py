"""F and J in one sweep, where a kernel does both: see ``sorder.kernels.hopper.forward_tangent``."""

from __future__ import annotations

import torch

from sorder.kernels.hopper import dispatch
from sorder.kernels.mask import Visibility
from sorder.kernels.spec import AttentionSpec


def forward_tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, vis: Visibility | None,
    tq: torch.Tensor | None, tk: torch.Tensor | None, tv: torch.Tensor | None, spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """(O, L, Ȯ, L̇, the part of Ȯ that its rounding loses), or ``None`` where two sweeps are as good or must do.

    Float16 has too few exponents for weights above 1, which the sweep needs.
    """
    if q.dtype != torch.bfloat16 or not dispatch.serves(q, k, v, bias, vis, spec, tq, tk, tv):
        return None
    from sorder.kernels.hopper.forward_tangent import forward_tangent as on_hopper

    return on_hopper(q, k, v, tq, tk, tv, spec)  # type: ignore[arg-type]
