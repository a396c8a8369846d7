"""Shapes, dtypes and strides of what the four operators return: promised to compilers by fake kernels, and kept."""

from __future__ import annotations

from typing import Any

import torch

from sorder.kernels.spec import lse_dtype


def matrix(like: torch.Tensor, width: int) -> torch.Tensor:
    """Uninitialised output with the rows of ``like``; keeps its memory layout where the width agrees."""
    if like.shape[-1] == width:
        y = torch.empty_like(like)
        if y.stride(-1) == 1:  # it need not be where rows of ``like`` overlap
            return y
    return like.new_empty((*like.shape[:-1], width))


def laid_out(y: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``y``, copied if it is not laid out as :func:`matrix` promises."""
    if y.stride() == like.stride() and y.shape == like.shape and y.stride(-1) == 1:
        return y
    if y.is_contiguous() and like.is_contiguous():  # strides of dimensions of size 1 may differ
        return y
    shadow = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    want = matrix(shadow, y.shape[-1]).stride()
    if all(a == b or n == 1 for a, b, n in zip(y.stride(), want, y.shape, strict=True)):
        return y
    return torch.empty_strided(y.shape, want, dtype=y.dtype, device=y.device).copy_(y)


def fake_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, v = args[0], args[2]
    return matrix(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=lse_dtype(q))


def fake_tangent(*args: Any) -> list[torch.Tensor]:
    q, v = args[0], args[2]
    low = [matrix(q, v.shape[-1])] if q.dtype.itemsize == 2 else []
    return [matrix(q, v.shape[-1]), torch.empty_like(args[10], memory_format=torch.contiguous_format), *low]


def fake_backward(*args: Any) -> list[torch.Tensor]:
    """For B and T: like the inputs whose letters are in ``wanted``, the sixth argument from the end."""
    *matrices, bias = args[:4]
    wanted = args[-6]
    outputs = [matrix(x, x.shape[-1]) for letter, x in zip("qkv", matrices, strict=True) if letter in wanted]
    if "b" in wanted:
        outputs.append(torch.empty_like(bias, memory_format=torch.contiguous_format))
    return outputs


def gradients(outputs: tuple[torch.Tensor | None, ...], args: tuple[Any, ...]) -> list[torch.Tensor]:
    """B's and T's outputs that exist, as :func:`fake_backward` promises them."""
    found = [laid_out(y, x) for y, x in zip(outputs[:3], args[:3], strict=True) if y is not None]
    if len(outputs) == 4 and outputs[3] is not None:
        found.append(outputs[3].contiguous())
    return found
