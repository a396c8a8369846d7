"""The plot of a run's loss."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def plot(history: list[dict[str, float]], title: str, path: Path) -> None:
    """``history`` has ``step`` and ``loss`` (nats) of every step, and ``held_out`` (bits) of some."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.plot(
        [h["step"] for h in history], [h["loss"] / math.log(2) for h in history], label="training batch", alpha=0.6
    )
    evaluated = [h for h in history if "held_out" in h]
    axes.plot([h["step"] for h in evaluated], [h["held_out"] for h in evaluated], "o-", label="held-out files")
    axes.set(xlabel="step", ylabel="bits per byte", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
