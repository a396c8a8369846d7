"""The kernels touch no memory but their own and race for none, as NVIDIA's compute-sanitizer sees it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sorder.kernels.hopper import dispatch

_ROOT = Path(__file__).parents[2]


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("family", ["hopper", "portable"])
def test_small_problems(family: str, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    if family == "hopper" and not dispatch._is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and Triton 3.6")
    command = [
        sanitizer,
        "--tool",
        tool,
        "--error-exitcode",
        "3",
        sys.executable,
        "-m",
        "tests.attention.small_problems",
    ]
    # Freed memory goes back to the driver: an access to it is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run([*command, family], cwd=_ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout, done.stdout[
        -4000:
    ]
