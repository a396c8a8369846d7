"""Which implementation serves one of the four maps: PyTorch's fused kernels, our Triton kernels, or the PyTorch twin."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch

from sorder.kernels import twin
from sorder.kernels.spec import AttentionSpec
from sorder.ops import fused

HAS_TRITON = importlib.util.find_spec("triton") is not None
_LARGE = 4096**2
"""Scores of one head above which the twin says that it is serving."""
_warned = False

_KERNELS: dict[str, Callable[..., Any]] = {}
if HAS_TRITON:
    from sorder.kernels.backward import backward as _backward
    from sorder.kernels.backward_tangent import backward_tangent as _backward_tangent
    from sorder.kernels.forward import forward as _forward
    from sorder.kernels.tangent import tangent as _tangent

    _KERNELS = {f.__name__: f for f in (_forward, _tangent, _backward, _backward_tangent)}

Optional = torch.Tensor | None


def kernels_serve(q: torch.Tensor) -> bool:
    """Whether the Triton kernels take this input: CUDA, at most float32, Triton installed, and something to compute."""
    return HAS_TRITON and q.is_cuda and q.dtype != torch.float64 and q.numel() > 0


def _note_twin(q: torch.Tensor, k: torch.Tensor) -> None:
    global _warned
    if not _warned and q.shape[-2] * k.shape[-2] >= _LARGE:
        _warned = True
        why = "float64 has no kernel" if q.dtype == torch.float64 else "the Triton kernels need Triton and a GPU"
        warnings.warn(
            f"sorder.attention of {q.shape[-2]} × {k.shape[-2]} scores a head runs on the tiled PyTorch twin ({why}): "
            "exact and in linear memory, but several times slower than a fused kernel.",
            stacklevel=2,
        )


def _map(name: str, q: torch.Tensor, k: torch.Tensor) -> Callable[..., Any]:
    if kernels_serve(q):
        return _KERNELS[name]
    _note_twin(q, k)
    return getattr(twin, name)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """F: output (..., Nq, dv) and log-sum-exp (..., Nq), float32 or float64."""
    kind = fused.backend(q, k, v, spec)
    if kind is not None:
        return fused.forward(q, k, v, spec, kind)
    return _map("forward", q, k)(q, k, v, spec)


def tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    tq: Optional, tk: Optional, tv: Optional, spec: AttentionSpec,
) -> tuple[Optional, Optional]:  # fmt: skip
    """J: tangents of F's outputs; ``None`` where no input moves."""
    if tq is None and tk is None and tv is None:
        return None, None
    return _map("tangent", q, k)(q, k, v, o, lse, tq, tk, tv, spec)


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    do: Optional, dl: Optional, wanted: str, spec: AttentionSpec,
) -> tuple[Optional, Optional, Optional]:  # fmt: skip
    """B: cotangents of F's inputs named in ``wanted``; ``None`` for the others and for those that are zero."""
    if not wanted or (do is None and dl is None):
        return None, None, None
    kind = fused.backend(q, k, v, spec) if dl is None else None
    if kind is not None and do is not None:
        return fused.backward(q, k, v, o, lse, do, spec, kind)
    return _map("backward", q, k)(q, k, v, o, lse, do, dl, wanted, spec)


def backward_tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    do: Optional, dl: Optional, tq: Optional, tk: Optional, tv: Optional,
    to: Optional, tl: Optional, tdo: Optional, tdl: Optional, wanted: str, spec: AttentionSpec,
) -> tuple[Optional, Optional, Optional]:  # fmt: skip
    """T: tangents of B's outputs named in ``wanted``; ``None`` for the others and for those that are zero."""
    moves = tq is not None or tk is not None or tdo is not None or tdl is not None or (tv is not None and do is not None)
    if not wanted or not moves:
        return None, None, None
    return _map("backward_tangent", q, k)(q, k, v, o, lse, do, dl, tq, tk, tv, to, tl, tdo, tdl, wanted, spec)
