"""Constants under transforms: what torch.func wraps although nothing differentiates it."""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor


def constant(x: Tensor) -> Tensor | None:
    """``x`` without the wrappers of transforms that do not differentiate it; ``None`` where one does, or maps it.

    Under ``torch.func.grad`` and ``jvp`` every operation wraps its result, those on constants, too.
    """
    while torch._C._functorch.is_gradtrackingtensor(x) and not _is_differentiated(x):
        x = torch._C._functorch.get_unwrapped(x)
    return None if torch._C._functorch.is_functorch_wrapped_tensor(x) or _is_differentiated(x) else x


def _is_differentiated(x: Tensor) -> bool:
    if x.requires_grad:
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
