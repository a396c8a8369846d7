"""Which implementation serves one of the four maps: PyTorch's fused kernels, our Triton kernels, or the twin."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch

from sorder.kernels import backward_and_tangent as joint_backward
from sorder.kernels import forward_and_tangent as joint_forward
from sorder.kernels import twin
from sorder.kernels.mask import NOTHING, Visibility
from sorder.kernels.spec import AttentionSpec
from sorder.ops import fused, layout
from sorder.ops.memo import remembered, where

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
Quadruple = tuple[Optional, Optional, Optional, Optional]


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


# The operators' arguments, flat: (q, k, v, bias), the five tensors of a Visibility, then those of the map; the last
# five are the spec's.


def parsed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """An operator's arguments as those of a map's implementation."""
    *tensors, scale, causal, softcap, dropout, precision = args
    spec = AttentionSpec(scale, causal, precision, softcap, dropout)
    return *tensors[:4], Visibility(*tensors[4:9]), *tensors[9:], spec


@remembered("forward", last=False)
def _forward_op(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, bias, vis, spec = parsed(args)
    kind = fused.backend(q, k, v, bias, vis, spec)
    if kind is not None:
        o, lse = fused.forward(q, k, v, spec, kind)
    else:
        o, lse = _map("forward", q, k)(q, k, v, bias, vis, spec)
    return layout.laid_out(o, q), lse.contiguous()


def _tangent_op(*args: Any) -> list[torch.Tensor]:
    to, tl, low = _map("tangent", args[0], args[1])(*parsed(args))
    to, tl = layout.laid_out(to, args[0]), tl.contiguous()
    return [to, tl] if low is None else [to, tl, layout.laid_out(low, args[0])]


@remembered("backward", last=True)
def _backward_op(*args: Any) -> list[torch.Tensor]:
    q, k, v, bias, vis, o, lse, do, dl, wanted, spec = parsed(args)
    kind = fused.backend(q, k, v, bias, vis, spec) if dl is None else None
    if kind is not None and do is not None:
        grads = fused.backward(q, k, v, o, lse, do, spec, kind)
        outputs = tuple(g if name in wanted else None for name, g in zip("qkv", grads, strict=True))
    else:
        outputs = _map("backward", q, k)(q, k, v, bias, vis, o, lse, do, dl, wanted, spec)
    return layout.gradients(outputs, args)


def _backward_tangent_op(*args: Any) -> list[torch.Tensor]:
    return layout.gradients(_map("backward_tangent", args[0], args[1])(*parsed(args)), args)


# Library operators, so that graph tracers (torch.func.linearize, make_fx) see one opaque call and not what a kernel
# launch leaves out. They return only the outputs that exist: ``wanted`` must name no others.
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, "
    "Tensor? start, Tensor? stop, Tensor? shown, Tensor? slopes, Tensor? seed"
)
_CACHES = f"{_INPUTS}, Tensor o, Tensor lse"
_TANGENTS = "Tensor? tq, Tensor? tk, Tensor? tv, Tensor? tbias"
_SPEC = "float scale, bool causal, float? softcap, float dropout, str precision"
library = torch.library.Library("sorder", "DEF")
for _signature, _implementation, _fake in (
    (f"attention_forward({_INPUTS}, {_SPEC}) -> (Tensor, Tensor)", _forward_op, layout.fake_forward),
    (f"attention_tangent({_CACHES}, {_TANGENTS}, {_SPEC}) -> Tensor[]", _tangent_op, layout.fake_tangent),
    (
        f"attention_backward({_CACHES}, Tensor? do, Tensor? dl, str wanted, {_SPEC}) -> Tensor[]",
        _backward_op,
        layout.fake_backward,
    ),
    (
        f"attention_backward_tangent({_CACHES}, Tensor? do, Tensor? dl, {_TANGENTS}, "
        f"Tensor? to, Tensor? tl, Tensor? to_low, Tensor? tdo, Tensor? tdl, str wanted, {_SPEC}) -> Tensor[]",
        _backward_tangent_op,
        layout.fake_backward,
    ),
):
    _name = _signature.split("(")[0]
    library.define(_signature)
    library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sorder::{_name}", _fake, lib=library)


def flat(tensors: tuple[Any, ...], vis: Visibility | None, *rest: Any) -> tuple[Any, ...]:
    """An operator's arguments: the opposite of :func:`parsed`."""
    *rest, spec = rest  # type: ignore[assignment]
    constants = (spec.scale, spec.causal, spec.softcap, spec.dropout, spec.precision)
    return *tensors, *(vis or NOTHING), *rest, *constants


def _call(operator: Callable[..., Any], *args: Any) -> Any:
    """The operator below autograd: its callers are the Functions that differentiate it."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*flat(*args))


def _existing(wanted: str, bias: Optional, v_moves: bool) -> str:
    """The letters of ``wanted`` whose output exists: that of an absent bias does not, nor a zero one of v."""
    return "".join(c for c in wanted if (c != "b" or bias is not None) and (c != "v" or v_moves))


def _spread(outputs: list[torch.Tensor], present: str) -> Quadruple:
    """(q, k, v, bias) with ``None`` for the letters that are not present."""
    found = dict(zip((c for c in "qkvb" if c in present), outputs, strict=True))
    return found.get("q"), found.get("k"), found.get("v"), found.get("b")


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Optional, vis: Visibility | None, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """F: output (..., Nq, dv) and log-sum-exp (..., Nq), float32 or float64."""
    return _call(torch.ops.sorder.attention_forward, (q, k, v, bias), vis, spec)


def forward_and_tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Optional, vis: Visibility | None,
    tq: Optional, tk: Optional, tv: Optional, tbias: Optional, spec: AttentionSpec,
) -> tuple[torch.Tensor, ...] | None:  # fmt: skip
    """F and J in one sweep: (o, lse, ȯ, l̇, what rounding ȯ lost); ``None`` where no kernel does both, or F is known."""
    if tbias is not None or not joint_forward.serves(q, k, v, bias, vis, spec, tq, tk, tv):
        return None
    assert tq is not None and tk is not None and tv is not None
    place = where("forward", flat((q, k, v, bias), vis, spec))
    if place is not None and place[1] in place[0]:
        return None
    with torch._C._AutoDispatchBelowAutograd():
        o, lse, to, tl, low = joint_forward.forward_and_tangent(q, k, v, tq, tk, tv, spec)
        o, to, low = (layout.laid_out(x, q) for x in (o, to, low))
        if place is not None and not place[2]:
            place[0].keep(place[1], (o, lse))
    return o, lse, to, tl, low


def tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Optional, vis: Visibility | None,
    o: torch.Tensor, lse: torch.Tensor, tq: Optional, tk: Optional, tv: Optional, tbias: Optional, spec: AttentionSpec,
) -> tuple[Optional, Optional, Optional]:  # fmt: skip
    """J: tangents of F's outputs, and what rounding Ȯ to 16 bits lost; ``None`` where no input moves."""
    if tq is None and tk is None and tv is None and tbias is None:
        return None, None, None
    outputs = _call(torch.ops.sorder.attention_tangent, (q, k, v, bias), vis, o, lse, tq, tk, tv, tbias, spec)
    return outputs[0], outputs[1], outputs[2] if len(outputs) == 3 else None


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Optional, vis: Visibility | None,
    o: torch.Tensor, lse: torch.Tensor, do: Optional, dl: Optional, wanted: str, spec: AttentionSpec,
) -> Quadruple:  # fmt: skip
    """B: cotangents of F's inputs named in ``wanted``; ``None`` for the others and for those that are zero."""
    wanted = _existing(wanted, bias, do is not None)
    if not wanted or (do is None and dl is None):
        return None, None, None, None
    outputs = _call(torch.ops.sorder.attention_backward, (q, k, v, bias), vis, o, lse, do, dl, wanted, spec)
    return _spread(outputs, wanted)


def backward_and_tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Optional, vis: Visibility | None,
    o: torch.Tensor, lse: torch.Tensor, do: Optional, dl: Optional,
    tq: Optional, tk: Optional, tv: Optional, tbias: Optional,
    to: Optional, tl: Optional, to_low: Optional, tdo: Optional, tdl: Optional, wanted: str, spec: AttentionSpec,
) -> tuple[Quadruple, Quadruple] | None:  # fmt: skip
    """B and T in one sweep; ``None`` where no kernel does both, or B is known."""
    if dl is not None or tdl is not None or tbias is not None or bias is not None or set(wanted) != set("qkv"):
        return None
    if not joint_backward.serves(q, k, v, bias, vis, spec, do, tq, tk, tv, to, tl, to_low):
        return None
    assert do is not None and tq is not None and tk is not None and tv is not None
    assert to is not None and tl is not None and to_low is not None
    place = where("backward", flat((q, k, v, bias), vis, o, lse, do, dl, wanted, spec))
    if place is not None and place[1] in place[0]:
        return None
    with torch._C._AutoDispatchBelowAutograd():
        outputs = joint_backward.backward_and_tangent(q, k, v, o, lse, do, tq, tk, tv, to, tl, to_low, tdo, spec)
        laid = [layout.laid_out(x, like) for x, like in zip(outputs, (q, k, v) * 2, strict=True)]
        if place is not None and not place[2]:
            place[0].keep(place[1], tuple(laid[:3]))
    return (*laid[:3], None), (*laid[3:], None)  # type: ignore[return-value]


def backward_tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Optional, vis: Visibility | None,
    o: torch.Tensor, lse: torch.Tensor, do: Optional, dl: Optional,
    tq: Optional, tk: Optional, tv: Optional, tbias: Optional,
    to: Optional, tl: Optional, to_low: Optional, tdo: Optional, tdl: Optional, wanted: str, spec: AttentionSpec,
) -> Quadruple:  # fmt: skip
    """T: tangents of B's outputs named in ``wanted``; ``None`` for the others and for those that are zero."""
    moves_p = tq is not None or tk is not None or tbias is not None
    wanted = _existing(wanted, bias, tdo is not None or (moves_p and do is not None))
    moves = moves_p or tdo is not None or tdl is not None or (tv is not None and do is not None)
    if not wanted or not moves:
        return None, None, None, None
    outputs = _call(
        torch.ops.sorder.attention_backward_tangent, (q, k, v, bias), vis, o, lse, do, dl,
        tq, tk, tv, tbias, to, tl, to_low, tdo, tdl, wanted, spec,
    )  # fmt: skip
    return _spread(outputs, wanted)
