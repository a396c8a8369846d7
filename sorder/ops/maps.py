"""Which implementation serves one of the four maps: PyTorch's fused kernels, our Triton kernels, or the twin."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch

from sorder.kernels import twin
from sorder.kernels.spec import AttentionSpec, Precision
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


def _forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, precision: Precision
) -> tuple[torch.Tensor, torch.Tensor]:
    spec = AttentionSpec(scale, causal, precision)
    kind = fused.backend(q, k, v, spec)
    if kind is not None:
        return fused.forward(q, k, v, spec, kind)
    return _map("forward", q, k)(q, k, v, spec)


def _tangent_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    tq: Optional, tk: Optional, tv: Optional, scale: float, causal: bool, precision: Precision,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    spec = AttentionSpec(scale, causal, precision)
    return _map("tangent", q, k)(q, k, v, o, lse, tq, tk, tv, spec)


def _backward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    do: Optional, dl: Optional, wanted: str, scale: float, causal: bool, precision: Precision,
) -> list[torch.Tensor]:  # fmt: skip
    spec = AttentionSpec(scale, causal, precision)
    kind = fused.backend(q, k, v, spec) if dl is None else None
    if kind is not None and do is not None:
        grads = fused.backward(q, k, v, o, lse, do, spec, kind)
        return [g for name, g in zip("qkv", grads, strict=True) if name in wanted]
    return [g for g in _map("backward", q, k)(q, k, v, o, lse, do, dl, wanted, spec) if g is not None]


def _backward_tangent_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    do: Optional, dl: Optional, tq: Optional, tk: Optional, tv: Optional,
    to: Optional, tl: Optional, tdo: Optional, tdl: Optional,
    wanted: str, scale: float, causal: bool, precision: Precision,
) -> list[torch.Tensor]:  # fmt: skip
    spec = AttentionSpec(scale, causal, precision)
    run = _map("backward_tangent", q, k)
    outputs = run(q, k, v, o, lse, do, dl, tq, tk, tv, to, tl, tdo, tdl, wanted, spec)
    return [x for x in outputs if x is not None]


# Library operators, so that graph tracers (torch.func.linearize, make_fx) see one opaque call and not what a kernel
# launch leaves out. They return only the outputs that exist.
_CACHES = "Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse"
_SPEC = "float scale, bool causal, str precision"
library = torch.library.Library("sorder", "DEF")
for _signature, _implementation in {
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_SPEC}) -> (Tensor, Tensor)": _forward_op,
    f"attention_tangent({_CACHES}, Tensor? tq, Tensor? tk, Tensor? tv, {_SPEC}) -> (Tensor, Tensor)": _tangent_op,
    f"attention_backward({_CACHES}, Tensor? do, Tensor? dl, str wanted, {_SPEC}) -> Tensor[]": _backward_op,
    f"attention_backward_tangent({_CACHES}, Tensor? do, Tensor? dl, Tensor? tq, Tensor? tk, Tensor? tv, "
    f"Tensor? to, Tensor? tl, Tensor? tdo, Tensor? tdl, str wanted, {_SPEC}) -> Tensor[]": _backward_tangent_op,
}.items():
    library.define(_signature)
    library.impl(_signature.split("(")[0], _implementation, "CompositeExplicitAutograd")


def moved_to_front(size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> list[Any]:
    """vmap's mapped axis as one more leading dimension; what is not mapped is expanded without a copy."""

    def move(x: Any, dim: int | None) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)

    return [move(x, dim) for x, dim in zip(args, in_dims, strict=True)]


def _vmap_rule(operator: Callable[..., Any]) -> Callable[..., Any]:
    """For graphs of the operators themselves, such as ``torch.func.linearize`` makes."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        outputs = operator(*moved_to_front(info.batch_size, in_dims, args))
        return outputs, type(outputs)([0] * len(outputs))

    return rule


for _name in ("forward", "tangent", "backward", "backward_tangent"):
    _operator = getattr(torch.ops.sorder, f"attention_{_name}")
    torch.library.register_vmap(f"sorder::attention_{_name}", _vmap_rule(_operator), lib=library)


def _call(operator: Callable[..., Any], *args: Any) -> Any:
    """The operator below autograd: its callers are the Functions that differentiate it."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def _spread(outputs: list[torch.Tensor], present: str) -> tuple[Optional, Optional, Optional]:
    """(q, k, v) with ``None`` for the letters that are not present."""
    remaining = iter(outputs)
    return tuple(next(remaining) if name in present else None for name in "qkv")  # type: ignore[return-value]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """F: output (..., Nq, dv) and log-sum-exp (..., Nq), float32 or float64."""
    return _call(torch.ops.sorder.attention_forward, q, k, v, spec.scale, spec.causal, spec.precision)


def tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    tq: Optional, tk: Optional, tv: Optional, spec: AttentionSpec,
) -> tuple[Optional, Optional]:  # fmt: skip
    """J: tangents of F's outputs; ``None`` where no input moves."""
    if tq is None and tk is None and tv is None:
        return None, None
    return _call(
        torch.ops.sorder.attention_tangent, q, k, v, o, lse, tq, tk, tv, spec.scale, spec.causal, spec.precision
    )


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    do: Optional, dl: Optional, wanted: str, spec: AttentionSpec,
) -> tuple[Optional, Optional, Optional]:  # fmt: skip
    """B: cotangents of F's inputs named in ``wanted``; ``None`` for the others and for those that are zero."""
    if do is None:
        wanted = wanted.replace("v", "")
    if not wanted or (do is None and dl is None):
        return None, None, None
    outputs = _call(
        torch.ops.sorder.attention_backward, q, k, v, o, lse, do, dl, wanted, spec.scale, spec.causal, spec.precision
    )
    return _spread(outputs, wanted)


def backward_tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    do: Optional, dl: Optional, tq: Optional, tk: Optional, tv: Optional,
    to: Optional, tl: Optional, tdo: Optional, tdl: Optional, wanted: str, spec: AttentionSpec,
) -> tuple[Optional, Optional, Optional]:  # fmt: skip
    """T: tangents of B's outputs named in ``wanted``; ``None`` for the others and for those that are zero."""
    moves_p = tq is not None or tk is not None
    if tdo is None and (not moves_p or do is None):
        wanted = wanted.replace("v", "")
    moves = moves_p or tdo is not None or tdl is not None or (tv is not None and do is not None)
    if not wanted or not moves:
        return None, None, None
    outputs = _call(
        torch.ops.sorder.attention_backward_tangent,
        q,
        k,
        v,
        o,
        lse,
        do,
        dl,
        tq,
        tk,
        tv,
        to,
        tl,
        tdo,
        tdl,
        wanted,
        spec.scale,
        spec.causal,
        spec.precision,
    )
    return _spread(outputs, wanted)
