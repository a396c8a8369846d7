"""Whether a tensor has been written to."""

from __future__ import annotations

from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """Rises with every in-place change; 0 where none is counted, as of inference tensors."""
    return 0 if tensor.is_inference() else tensor._version
