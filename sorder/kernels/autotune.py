"""Launch settings measured on this very GPU, where ``SORDER_AUTOTUNE=1`` asks for it; kept on disk.

The settings that ship were measured on an H200, and other GPUs get them shrunk until they fit. Tuning tries the
neighbours of such a setting on a problem of the call's widths and dtype, but of at most 4,096 queries and keys, once
for each kernel, and takes minutes for compilation. What it finds is in ``$SORDER_CACHE_DIR`` (by default
``~/.cache/sorder``), in a file for each GPU and version of Triton.
"""

from __future__ import annotations

import functools
import json
import os
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

LENGTH = 4096
"""Longest problem that is timed: what is fastest hardly depends on the length, what it takes to find out does."""


def enabled() -> bool:
    """Whether the environment asks for tuning."""
    return os.environ.get("SORDER_AUTOTUNE", "0") not in ("", "0")


def neighbours(config: Any) -> Iterator[Any]:
    """``config``, then the settings that differ from it by one or two steps."""
    yield config
    for rows, cols in ((1, 1), (2, 1), (1, 2), (0.5, 1), (1, 0.5), (2, 0.5), (0.5, 2)):
        for warps in (4, 8):
            for stages in (config.stages, config.stages + 1, config.stages - 1):
                tried = type(config)(int(config.rows * rows), int(config.cols * cols), warps, stages)
                if tried != config and min(tried.rows, tried.cols) >= 16 and max(tried[:2]) <= 256 and stages > 0:
                    yield tried


def tuned(key: tuple[Any, ...], config: Any, attempt: Callable[[Any], None], device: torch.device) -> Any:
    """The fastest neighbour of ``config`` for a kernel and problem named by ``key``.

    Args:
        key: what the setting may depend on; never a length.
        config: where to begin, a :class:`sorder.kernels.launch.Config`.
        attempt: launches the kernel with a setting, or raises where it does not fit.
        device: the GPU.
    """
    path = _cache_file(device)
    known = _read(path)
    name = repr(key)
    if name not in known:
        known[name] = list(_fastest(config, attempt))
        _write(path, known)
    return type(config)(*known[name])


def _fastest(config: Any, attempt: Callable[[Any], None]) -> Any:
    times = {}
    for candidate in neighbours(config):
        try:
            times[candidate] = _milliseconds(functools.partial(attempt, candidate))
        except (OutOfResources, triton.CompilationError, RuntimeError):
            continue
    return min(times, key=times.__getitem__) if times else config


def _milliseconds(run: Callable[[], None]) -> float:
    """Median of five runs after two that warm up."""
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def _cache_file(device: torch.device) -> Path:
    folder = os.environ.get("SORDER_CACHE_DIR") or Path.home() / ".cache" / "sorder"
    name = re.sub(r"\W+", "-", f"{torch.cuda.get_device_name(device)}-triton-{triton.__version__}")
    return Path(folder) / f"{name}.json"


def _read(path: Path) -> dict[str, list[int]]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _write(path: Path, known: dict[str, list[int]]) -> None:
    """Through a file beside it, so that no other process reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(known, indent=1))
    part.replace(path)
