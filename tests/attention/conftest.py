"""Where the operator's tests run: the twin, Triton's interpreter, and on a GPU the twin and the kernels."""

from __future__ import annotations

import pytest
import torch

from sorder.ops import maps

SETTINGS = [
    pytest.param(("cpu", torch.float64, 1e-13), id="twin"),
    pytest.param(("interpreter", torch.float32, 3e-6), id="interpreter"),
    pytest.param(("cuda", torch.float64, 1e-13), id="cuda-twin", marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.float32, 3e-6), id="cuda-float32", marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.bfloat16, 2e-2), id="cuda-bfloat16", marks=pytest.mark.gpu),
]


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, torch.dtype, float]:
    """(device, dtype, relative error): on CPU tensors in the interpreter, kernels are made to serve."""
    device, dtype, bound = request.param
    if device == "interpreter":
        if torch.cuda.is_available():
            pytest.skip("the kernels are compiled, not interpreted")
        pytest.importorskip("triton")
        monkeypatch.setattr(maps, "kernels_serve", lambda q: True)
        device = "cpu"
    return device, dtype, bound
