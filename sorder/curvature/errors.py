"""Reads from an autograd error which operation lacks which derivative, and says what to do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from sorder.func._user_warning import warn_user


class CurvatureError(RuntimeError):
    """A curvature product cannot be had: an operation in the closure lacks the derivatives it needs."""


class MissingDerivativeError(RuntimeError):
    """One way of taking a product fails, because ``operation`` lacks a derivative."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} lacks a derivative")
        self.operation = operation


# What PyTorch says then; a pattern finds the operation's name where the message has one.
_MISSING = (
    r"derivative for '?(?P<op>[\w:]+)'? is not implemented",
    r"forward AD with (?P<op>[\w:]+) that does not support it",
    r"the jvp function for (?P<op>custom autograd\.Function)",
    r"to use an (?P<op>autograd\.Function) with functorch",
    r"marked with (?P<op>@once_differentiable)",
    r"(?P<op>aot_autograd) does not currently support double backward",
    r"Double backwards is not supported for (?P<op>CuDNN RNNs)",
    r"(?P<op>torch\.utils\.checkpoint) is incompatible with",
    r"don't yet support (?P<op>saved tensor hooks)",
    r"in-place operation \((?P<op>[\w:]+)\) that would mutate",
    r"You are attempting to call (?P<op>Tensor\.requires_grad_)",
    r"does not require grad and does not have a grad_fn",
    r"appears to not have been used in the graph",
    r"Cannot access data pointer of Tensor",
    r"expected scalar type \w+ but found \w+",
)
_REMEDIES = (
    (
        "scaled_dot_product",
        "PyTorch's fused attention has first derivatives only: make the point and take its products under "
        "sorder.exact_attention() (an optimizer does so where attention='exact', its default), or run the closure "
        "under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
    ),
    ("checkpoint", "pass use_reentrant=False to torch.utils.checkpoint, or use sorder.func.checkpoint"),
    (
        "aot_autograd",
        "call the module that torch.compile wrapped, or torch.compiler.set_stance('force_eager')",
    ),
    (
        "weight_norm",
        "its backward pass, where PyTorch differentiates it, takes the norms for constants: use "
        "mode='forward-over-reverse' or 'auto', without torch.utils.checkpoint, or write the parametrization as "
        "g * v / norm",
    ),
    ("CuDNN RNNs", "run the closure under torch.backends.cudnn.flags(enabled=False)"),
    ("autograd.Function", "write its backward in differentiable operations, and a jvp where forward mode is wanted"),
)


def missing_derivative(error: BaseException) -> str | None:
    """Name of the operation that lacks a derivative according to ``error``; None if it says something else.

    Where the message names no operation, its first line stands for the name.
    """
    if isinstance(error, MissingDerivativeError):
        return error.operation
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return None
    message = str(error)
    for pattern in _MISSING:
        found = re.search(pattern, message)
        if found:
            return found.groupdict().get("op") or message.strip().splitlines()[0]
    return None


def remedy(operation: str) -> str:
    """What a user can do about ``operation``."""
    for key, text in _REMEDIES:
        if key in operation:
            return text
    return "replace it by differentiable PyTorch operations, or give it the derivative that is missing"


def among(suspects: Sequence[str]) -> str:
    """Names ``suspects``, the autograd.Functions in the graph, for a message."""
    return f" (autograd.Functions in the graph: {', '.join(suspects)})" if suspects else ""


def curvature_error(operation: str, tried: Sequence[str], suspects: Sequence[str]) -> CurvatureError:
    """The error for a closure in which ``operation`` defeated every mode ``tried``."""
    return CurvatureError(
        f"no curvature product by {' or '.join(tried)}: {operation} lacks a derivative{among(suspects)}. "
        f"Remedy: {remedy(operation)}."
    )


_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Warn with ``message``, at the user's line, unless ``key`` was warned about in this process."""
    if key not in _warned:
        _warned.add(key)
        warn_user(message, RuntimeWarning)
