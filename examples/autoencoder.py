"""Trains the deep sigmoid autoencoder that second-order optimizers are measured on, on drawings of random curves.

    python examples/autoencoder.py                             # K-FAC, a minute on a CPU
    python examples/autoencoder.py --optimizer hybrid          # Newton-CG with exact products, preconditioned by K-FAC
    python examples/autoencoder.py --optimizer kfac adamw sgd newton-cg shampoo --seconds 30
    python examples/autoencoder.py --side 28 --widths 400 200 100 6 --images 20000 --device cuda

Eight layers down to a code of six numbers and up again (Hinton & Salakhutdinov 2006; Martens 2010). The data set is
made here: each image is one smooth curve. It writes to --out: results.json, error.png, reconstructions.png.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

import sorder

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Starting points; benchmarks/kfac_autoencoder.py searches a grid. Where steps have a length of their own, half the way
# to one batch's minimum is better for the other batches.
LEARNING_RATES = {"kfac": 0.5, "hybrid": 0.5, "newton-cg": 0.5, "sgd": 0.03, "adamw": 3e-3, "shampoo": 0.1}


@functools.cache
def curves(count: int, side: int, seed: int = 0) -> Tensor:
    """(count, side²) images in [0, 1] of quadratic Bézier curves through random control points."""
    generator = torch.Generator().manual_seed(seed)
    control = torch.rand(count, 3, 2, generator=generator) * 0.8 + 0.1
    t = torch.linspace(0, 1, 3 * side)[:, None]
    weights = torch.cat([(1 - t) ** 2, 2 * t * (1 - t), t**2], dim=1)
    points = torch.einsum("tk,nkd->ntd", weights, control) * side - 0.5
    pixels = torch.arange(side).float()
    images = []
    for some in points.split(256):
        across, down = (torch.exp(-((some[..., d, None] - pixels) ** 2)) for d in (0, 1))
        # A pixel is as dark as the nearest point of the curve is near.
        images.append((down[..., :, None] * across[..., None, :]).amax(1).flatten(1))
    return torch.cat(images)


def autoencoder(pixels: int, widths: list[int], seed: int = 0) -> nn.Sequential:
    """pixels → widths → … → pixels, sigmoids between but for a linear code; sparse initialisation (Martens 2010, 5)."""
    sizes = [pixels, *widths, *reversed(widths[:-1]), pixels]
    layers: list[nn.Module] = []
    generator = torch.Generator().manual_seed(seed)
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        linear = nn.Linear(inputs, outputs)
        with torch.no_grad():
            nn.init.zeros_(linear.bias)
            chosen = torch.rand(outputs, inputs, generator=generator).argsort(1) < 15
            linear.weight.copy_(torch.randn(outputs, inputs, generator=generator) * chosen)
        layers.append(linear)
        if i not in (len(widths) - 1, len(sizes) - 2):
            layers.append(nn.Sigmoid())
    return nn.Sequential(*layers)


def make(name: str, model: nn.Module, lr: float | None = None, **options: Any) -> Optimizer:
    """The optimizer called ``name``, with its own learning rate unless ``lr`` is given."""
    rate = LEARNING_RATES[name] if lr is None else lr
    # There is no attention here whose calls would have to be looked for.
    exact: dict[str, Any] = {"lr": rate, "attention": None}
    if name == "kfac":
        return sorder.KFAC(model, **{**exact, "inverse_interval": 5, **options})
    if name == "hybrid":
        kfac = sorder.KFACPreconditioner(model, least_damping=0.3)
        return sorder.NewtonCG(model.parameters(), preconditioner=kfac, **{**exact, **options})
    if name == "newton-cg":
        return sorder.NewtonCG(model.parameters(), **{**exact, **options})
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=rate, **{"momentum": 0.99, "nesterov": True, **options})
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=rate, **{"weight_decay": 0.0, **options})
    import torch_optimizer

    return torch_optimizer.Shampoo(model.parameters(), lr=rate, **{"momentum": 0.9, **options})


def step(optimizer: Optimizer, loss: Callable[[], Tensor]) -> Tensor:
    """One step; second-order optimizers differentiate the loss themselves."""
    if isinstance(optimizer, (sorder.KFAC, sorder.NewtonCG)):
        return optimizer.step(loss)
    optimizer.zero_grad()
    value = loss()
    value.backward()
    optimizer.step()
    return value.detach()


class Training:
    """One optimizer on the autoencoder; ``curve`` is its error against steps and seconds, those of ``clock``."""

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        lr: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        **options: Any,
    ) -> None:
        self.name, self.args, self.clock = name, args, clock
        device = torch.device(args.device)
        self.images = curves(args.images, args.side, args.seed).to(device)
        self.model = autoencoder(args.side**2, args.widths, args.seed).to(device)
        self.optimizer = make(name, self.model, lr, **options)
        self.lr, self.steps, self.seconds = self.optimizer.param_groups[0]["lr"], 0, 0.0
        self.curve = [{"step": 0.0, "seconds": 0.0, "error": self.error()}]

    def loss(self, images: Tensor) -> Tensor:
        """Cross-entropy of the pixels, in nats per image."""
        logits = self.model(images)
        return F.binary_cross_entropy_with_logits(logits, images, reduction="sum") / len(images)

    @torch.no_grad()
    def error(self) -> float:
        """Squared error per image over all training images."""
        return ((torch.sigmoid(self.model(self.images)) - self.images) ** 2).sum(1).mean().item()

    def batch(self) -> Tensor:
        """The images of the next step: a function of its number alone."""
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + self.steps)
        chosen = torch.randperm(len(self.images), generator=generator)[: self.args.batch]
        return self.images[chosen.to(self.images.device)]

    def advance(self) -> None:
        images = self.batch()
        began = self._now()
        value = step(self.optimizer, lambda: self.loss(images))
        self.seconds += self._now() - began
        self.steps += 1
        if not bool(torch.isfinite(value)):
            raise FloatingPointError(f"the loss of {self.name} is {float(value)}")
        # Evaluations get rarer, so that they never cost more than a tenth of the steps.
        if self.steps <= 10 or self.steps % max(1, self.steps // 10) == 0:
            self.record()

    def record(self) -> None:
        if self.curve[-1]["step"] != self.steps:
            self.curve.append({"step": float(self.steps), "seconds": self.seconds, "error": self.error()})

    def run(self) -> dict[str, Any]:
        """Train for ``args.steps`` steps or ``args.seconds`` seconds, and tell what came of it."""
        failed = None
        with tqdm(total=self.args.seconds, desc=self.name, unit="s", disable=self.args.quiet) as bar:
            while self.steps < self.args.steps and self.seconds < self.args.seconds:
                try:
                    self.advance()
                except FloatingPointError as error:
                    failed = str(error)
                    break
                bar.set_postfix_str(f"step {self.steps}, error {self.curve[-1]['error']:.3f}")
                bar.update(min(self.seconds, self.args.seconds) - bar.n)
        self.record()
        return {"optimizer": self.name, "lr": self.lr, "steps": self.steps, "seconds": self.seconds,
                "error": self.curve[-1]["error"], "failed": failed, "curve": self.curve}  # fmt: skip

    def _now(self) -> float:
        if self.images.is_cuda:
            torch.cuda.synchronize()
        return self.clock()


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Training error against steps and against seconds."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axis, key in zip(axes, ("step", "seconds"), strict=True):
        for run in runs:
            points = [p for p in run["curve"] if p[key] > 0]
            label = f"{run['optimizer']}, lr {run['lr']:g}"
            axis.plot([p[key] for p in points], [p["error"] for p in points], label=label)
        axis.set(xlabel={"step": "steps"}.get(key, key), xscale="log", yscale="log")
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("squared error per training image")
    axes[0].legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


@torch.no_grad()
def show(training: Training, path: Path, count: int = 10) -> None:
    """Some images above what the autoencoder makes of them."""
    images = training.images[:count]
    rows = [images, torch.sigmoid(training.model(images))]
    side = training.args.side
    picture = torch.cat([torch.cat(list(row.view(-1, side, side)), 1) for row in rows]).cpu()
    plt.imsave(path, picture.numpy(), cmap="gray_r", vmin=0, vmax=1)


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--optimizer", nargs="+", choices=sorted(LEARNING_RATES), default=["kfac"], help="default: kfac"
    )
    parser.add_argument("--lr", type=float, help="learning rate; default: the optimizer's")
    parser.add_argument("--steps", type=positive, default=100_000, help="at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, for each optimizer; default 60")
    parser.add_argument("--side", type=positive, default=16, help="of an image, in pixels; default 16")
    parser.add_argument("--widths", type=positive, nargs="+", default=[128, 64, 32, 6], help="default 128 64 32 6")
    parser.add_argument("--images", type=positive, default=2000, help="default 2000")
    parser.add_argument("--batch", type=positive, default=500, help="images of a step; default 500")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/autoencoder"), help="default: runs/autoencoder")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    runs = []
    for name in args.optimizer:
        training = Training(name, args, args.lr)
        runs.append(training.run())
        print(f"{name:<10} {training.steps:>6} steps, {training.seconds:6.1f} s, error {runs[-1]['error']:.4f}")
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "quiet")}
    (args.out / "results.json").write_text(json.dumps({"settings": settings, "runs": runs}, indent=1) + "\n")
    plot(runs, args.out / "error.png")
    show(training, args.out / "reconstructions.png")
    print(f"wrote results.json, error.png and reconstructions.png to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
