"""Newton-CG with and without K-FAC, K-FAC, AdamW and Muon on a byte-level GPT: held-out loss against steps and seconds.

    python benchmarks/kfac_gpt.py --minutes 10                           # one H200: 10.6M parameters, 16 × 2,048 tokens
    python benchmarks/kfac_gpt.py --shape '{"context": 32768, "batch": 1}' --minutes 10
    python benchmarks/kfac_gpt.py --smoke --out smoke.json               # any machine, only to see that it runs

AdamW and Muon run over a grid of five learning rates with a warm-up and a linear decay to zero, for as many seconds as
the others get; step n sees the same windows of text in every run. Seconds are those of the steps.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import corpus
import optimizers
import record
from gpt import GPT

import sorder

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SHAPE = {"context": 2048, "batch": 16, "curvature_batch": 4, "layers": 6, "width": 384, "heads": 6, "windows": 32}
GRID = {"adamw": [5e-4, 1e-3, 2e-3, 4e-3, 8e-3], "muon": [5e-3, 1e-2, 2e-2, 4e-2, 8e-2]}
WARMUP = 0.05  # share of the seconds over which a first-order optimizer's rate rises
SECOND_ORDER = ("newton-cg", "hybrid", "hybrid-ekfac", "kfac", "kfac-kl")


def make(name: str, model: GPT, lr: float | None) -> Optimizer:
    """The optimizer called ``name``."""
    if name in GRID:
        return optimizers.make(name, model, lr)
    params = model.parameters()
    if name == "newton-cg":
        return sorder.NewtonCG(params, lr=0.5, cg_iterations=30)
    if name.startswith("hybrid"):
        inverse = "ekfac" if name.endswith("ekfac") else "cholesky"
        kfac = sorder.KFACPreconditioner(model, inverse=inverse, inverse_interval=5)
        return sorder.NewtonCG(params, lr=0.5, cg_iterations=10, preconditioner=kfac)
    intervals = {"factor_interval": 5, "inverse_interval": 20}
    if name == "kfac-kl":
        return sorder.KFAC(model, lr=0.3, step_rule="kl", damping=1e-3, **intervals)  # type: ignore[arg-type]
    return sorder.KFAC(model, lr=0.5, **intervals)  # type: ignore[arg-type]


class Run:
    """One optimizer on the text, for ``seconds``."""

    def __init__(self, name: str, text: corpus.Corpus, args: argparse.Namespace, lr: float | None = None) -> None:
        self.name, self.text, self.args, shape = name, text, args, args.shape
        torch.manual_seed(0)
        self.device = torch.device(args.device)
        self.model = GPT(256, shape["width"], shape["layers"], shape["heads"], shape.get("checkpoint", False))
        self.model.to(self.device)
        self.optimizer = make(name, self.model, lr)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.held_out = text.evaluation(shape["windows"], shape["context"])
        self.steps, self.spent = 0, 0.0

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in nats."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(tokens[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def advance(self) -> None:
        shape = self.args.shape
        tokens = self.text.batch(self.steps, shape["batch"], shape["context"], 0).to(self.device)
        few = tokens[: shape["curvature_batch"]]
        whole, part = (lambda: self.loss(tokens)), (lambda: self.loss(few))
        began = self._now()
        value = self._step(whole, part)
        self.spent += self._now() - began
        self.steps += 1
        if not bool(torch.isfinite(value)):
            raise FloatingPointError(f"the loss is {float(value)}")

    def _step(self, whole: Callable[[], Tensor], part: Callable[[], Tensor]) -> Tensor:
        if self.name in GRID:
            done = self.spent / self.args.seconds
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * min((done + 1e-3) / WARMUP, max(0.0, 1.0 - done))
            return optimizers.step(self.optimizer, whole, part)
        if isinstance(self.optimizer, sorder.NewtonCG):
            return self.optimizer.step(whole, curvature_closure=part)
        if isinstance(self.optimizer, sorder.KFAC) and self.name == "kfac-kl":
            if self.optimizer.curvature_due:
                self.optimizer.update_curvature(part)
            self.optimizer.zero_grad()
            value = whole()
            value.backward()
            self.optimizer.step()
            return value.detach()
        assert isinstance(self.optimizer, sorder.KFAC)
        return self.optimizer.step(whole)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Held-out nats per byte."""
        losses = [self.loss(rows.to(self.device)) * len(rows) for rows in self.held_out.split(self.args.shape["batch"])]
        return (torch.stack(losses).sum() / len(self.held_out)).item()

    def point(self) -> dict[str, Any]:
        found: dict[str, Any] = {"step": self.steps, "seconds": self.spent, "held_out": self.evaluate()}
        last = getattr(self.optimizer, "last_step", None)
        for key in ("cg_iterations", "products", "damping", "reduction_ratio", "accepted"):
            if last is not None and hasattr(last, key):
                found[key] = getattr(last, key)
        return found

    def run(self) -> dict[str, Any]:
        """Train, evaluating 20 times; tell what came of it."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        curve, error, due = [self.point()], None, 0.0
        while self.spent < self.args.seconds and self.steps < self.args.steps:
            try:
                self.advance()
            except (FloatingPointError, torch.cuda.OutOfMemoryError) as problem:
                error = str(problem).partition("\n")[0]
                break
            if self.spent >= due:
                curve.append(self.point())
                due = self.spent + self.args.seconds / 20
        if error is None and curve[-1]["step"] != self.steps:
            curve.append(self.point())
        memory = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return {
            "optimizer": self.name, "lr": self.rates[0], "steps": self.steps, "seconds": self.spent,
            "seconds_per_step": self.spent / max(1, self.steps), "peak_memory": memory, "error": error, "curve": curve,
        }  # fmt: skip

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def final(run: dict[str, Any]) -> float:
    """Held-out nats per byte at the end; infinite where the run failed."""
    value = run["curve"][-1]["held_out"]
    return value if run["error"] is None and math.isfinite(value) else math.inf


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Each optimizer's best run, and when the best AdamW run first was where it ended."""
    table: dict[str, Any] = {}
    adamw = min((r for r in runs if r["optimizer"] == "adamw"), key=final)
    for name in dict.fromkeys(r["optimizer"] for r in runs):
        own = [r for r in runs if r["optimizer"] == name]
        best = min(own, key=final)
        rates = [r["lr"] for r in own]
        reached = next((p for p in adamw["curve"] if p["held_out"] <= final(best)), None)
        table[name] = {
            "held_out": final(best),
            **{k: best[k] for k in ("lr", "steps", "seconds", "seconds_per_step", "peak_memory")},
            "at_the_end_of_the_grid": len(rates) > 1 and best["lr"] in (min(rates), max(rates)),
            "adamw_there_after": reached and {k: reached[k] for k in ("step", "seconds")},
        }
    return table


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for name in dict.fromkeys(r["optimizer"] for r in runs):
        best = min((r for r in runs if r["optimizer"] == name), key=final)
        for axis, key in zip(axes, ("step", "seconds"), strict=True):
            points = [p for p in best["curve"] if p[key] > 0]
            axis.plot([p[key] for p in points], [p["held_out"] for p in points], ".-", label=f"{name}, {best['lr']:g}")
            axis.set(xlabel=key, xscale="log")
            axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out nats per byte")
    axes[0].legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/kfac_gpt.json"), help="JSON; PNG beside it"
    )
    parser.add_argument("--commit", help="recorded in the results; default: git's HEAD")
    parser.add_argument("--minutes", type=float, default=10.0, help="wall budget, shared evenly by the runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", type=json.loads, default={}, help='as in \'{"context": 8192, "batch": 4}\'')
    parser.add_argument("--optimizers", nargs="+", default=[*SECOND_ORDER, *GRID], choices=[*SECOND_ORDER, *GRID])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    args = parser.parse_args(argv)
    args.shape = {**SHAPE, **args.shape}
    args.steps = 1_000_000
    stride = 1
    if args.smoke:
        args.shape |= {
            "context": 16,
            "batch": 4,
            "curvature_batch": 2,
            "layers": 1,
            "width": 16,
            "heads": 2,
            "windows": 2,
        }
        args.steps, stride = 2, 2
    chosen: list[tuple[str, float | None]] = []
    for name in args.optimizers:
        chosen += [(name, lr) for lr in GRID[name][::stride]] if name in GRID else [(name, None)]
    # A quarter of the wall budget is left for evaluations and first calls, which compile kernels.
    args.seconds = 0.75 * 60 * args.minutes / len(chosen)
    text = corpus.load(None, args.shape["context"])
    results: dict[str, Any] = {
        "environment": record.environment(torch.device(args.device), args.commit),
        "configuration": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "out"},
        "runs": [],
    }
    for name in dict.fromkeys(name for name, _ in chosen):  # first calls compile kernels
        Run(name, text, args, min(GRID[name]) if name in GRID else None).advance()
    for name, lr in chosen:
        run = Run(name, text, args, lr).run()
        results["runs"].append(run)
        print(f"{name:<13} lr {run['lr']:<7g} {run['steps']:>5} steps of {run['seconds_per_step']:.3f} s, "
              f"held-out {run['curve'][-1]['held_out']:.4f} nats/byte {run['error'] or ''}", flush=True)  # fmt: skip
        record.write(args.out, results)
    if any(name == "adamw" for name, _ in chosen):
        results["summary"] = summary(results["runs"])
        record.write(args.out, results)
        print(json.dumps(results["summary"], indent=1))
    plot(results["runs"], args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
