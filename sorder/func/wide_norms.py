"""Norms of 16-bit inputs evaluated in float32, so that their tangents have their outputs' dtypes.

Where PyTorch keeps the statistics of a 16-bit input in float32 — on CUDA always, on the CPU beside float32 weights —
the forward-mode rules of its norms give the 16-bit output a float32 tangent (through torch 2.13), over which the next
matrix product raises. In reverse mode autograd casts gradients back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from sorder.func.no_grad import NoGradStopsTangents

_NARROW = (torch.float16, torch.bfloat16)


class ForwardMode(NoGradStopsTangents):
    """Within this mode tangents are those of the function as reverse mode sees it, in its dtypes.

    It is a :class:`sorder.func.no_grad.NoGradStopsTangents` that evaluates the norms of 16-bit inputs in float32, as
    PyTorch does, but with casts that tangents follow.
    """

    def __init__(self) -> None:
        super().__init__()
        self._replacements: dict[Any, Callable[..., Any]] = dict(WIDE_NORMS)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``func`` or its replacement."""
        return self._replacements.get(func, func)(*args, **kwargs)


def wide(input: Tensor) -> tuple[Tensor, torch.dtype]:
    """``input`` in float32 at least, and the dtype that the norm returns."""
    kind = input.device.type
    # CUDA's autocast runs norms in float32 and returns it; the CPU's leaves them alone.
    out = torch.float32 if kind == "cuda" and torch.is_autocast_enabled(kind) else input.dtype
    return input.to(torch.promote_types(input.dtype, torch.float32)), torch.promote_types(out, input.dtype)


def _widened(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(norm)
    def wrapped(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.dtype not in _NARROW:
            return norm(input, *args, **kwargs)
        x, dtype = wide(input)
        args, kwargs = tree_map(_float, (args, kwargs))
        return norm(x, *args, **kwargs).to(dtype)

    return wrapped


def _float(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in _NARROW else x


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.batch_norm``, of 16-bit inputs in float32."""
    running = (running_mean, running_var)
    return _with_statistics(F.batch_norm, input, running, (weight, bias), training, momentum, eps)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.instance_norm``, of 16-bit inputs in float32."""
    running = (running_mean, running_var)
    return _with_statistics(F.instance_norm, input, running, (weight, bias), use_input_stats, momentum, eps)


def _with_statistics(
    norm: Callable[..., Tensor],
    input: Tensor,
    running: tuple[Tensor | None, Tensor | None],
    affine: tuple[Tensor | None, Tensor | None],
    own: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """``own``: the input's statistics normalise it, and update the running ones."""
    if own and input.dtype in _NARROW and running[0] is not None:
        # PyTorch updates them as ever; transforms would refuse to copy a float32 update into them.
        norm(input.detach(), *running, None, None, True, momentum, eps)
        running = (None, None)
    return _widened(norm)(input, *running, *affine, own, momentum, eps)


WIDE_NORMS: dict[Any, Callable[..., Tensor]] = {
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
} | {norm: _widened(norm) for norm in (
    F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, F.rms_norm, torch.rms_norm,
)}  # fmt: skip
