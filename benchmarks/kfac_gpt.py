r"""K-FAC, Newton-CG with and without it, AdamW and Muon on a byte-level GPT: held-out loss against steps and seconds.

    python benchmarks/kfac_gpt.py --minutes 5               # one H200: 10.7M parameters, 16 × 2,048 tokens a step
    python benchmarks/kfac_gpt.py --long --minutes 5        # one sequence of 32,768 tokens a step: time and memory, too
    python benchmarks/kfac_gpt.py --device cpu --seconds 25 --minutes 10 --out benchmarks/results/kfac_gpt_cpu.json \
        --shape '{"context": 64, "batch": 64, "curvature_batch": 64, "layers": 2, "width": 64, "heads": 4}'
    python benchmarks/kfac_gpt.py --smoke --out smoke.json  # any machine, only to see that it runs

The hybrid (Newton-CG's exact products, K-FAC before them) runs for a share of the time, which sets the number of steps.
At equal tokens the other second-order optimizers take as many, and so do AdamW, Muon and K-FAC with bounded divergence
("kfac-kl", whose steps need no products) at every learning rate of a grid; at equal seconds these three run once more
as long as the hybrid, with the grid's best rate and a quarter of it. Their rates (of "kfac-kl" the root of its bound,
which makes the length of its steps) warm up and fall linearly to zero, in steps or in seconds. Step n sees the same
windows of text in every run. Seconds are those of the steps, evaluation left out; on a CPU those that one thread
computes, so that work beside it does not count. Results are written after every run.
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
LONG = {"context": 32_768, "batch": 1, "curvature_batch": 1, "windows": 2}
SMOKE = {"context": 16, "batch": 4, "curvature_batch": 2, "layers": 1, "width": 16, "heads": 2, "windows": 2}
GRID = {
    "adamw": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2],
    "muon": [1e-2, 2e-2, 4e-2, 8e-2, 1.6e-1],
    "kfac-kl": [0.1, 0.3, 1.0],
}
SECOND_ORDER = ("hybrid", "newton-cg", "kfac", "hybrid-ekfac")
WARMUP = 0.05  # share of a run over which a first-order optimizer's rate rises
# Shares of the wall time that second-order optimizers may take at most; the hybrid's sets the number of steps.
SHARES = {"hybrid": 0.1, "newton-cg": 0.3, "kfac": 0.12, "hybrid-ekfac": 0.12}
EVALUATIONS = 32


def make(name: str, model: GPT, lr: float | None, options: dict[str, dict[str, Any]]) -> Optimizer:
    """The optimizer called ``name``; ``options`` has what it gets beside its defaults."""
    more = options.get(name.partition("-ekfac")[0], {})
    if name in ("hybrid", "hybrid-ekfac"):
        kind = "ekfac" if name.endswith("ekfac") else "kfac"
        return optimizers.make("newton-cg", model, lr, preconditioner=kind, **more)
    if name == "kfac-kl":
        own: dict[str, Any] = {"damping": 1e-6, "least_damping": 30.0, "momentum": 0.5, "inverse_interval": 2}
        return sorder.KFAC(model, step_rule="kl", factor_interval=2, **{**own, **more})
    return optimizers.make(name, model, lr, **more)


class Run:
    """One optimizer on the text, for ``steps`` steps or ``seconds`` seconds."""

    def __init__(
        self,
        name: str,
        text: corpus.Corpus,
        args: argparse.Namespace,
        lr: float | None = None,
        steps: float = math.inf,
        seconds: float = math.inf,
        until: float = math.inf,
    ) -> None:
        self.name, self.text, self.args, shape = name, text, args, args.shape
        self.most, self.seconds, self.until = steps, seconds, until
        torch.manual_seed(0)
        self.device = torch.device(args.device)
        self.model = GPT(256, shape["width"], shape["layers"], shape["heads"], shape.get("checkpoint", False))
        self.model.to(self.device)
        self.optimizer = make(name, self.model, lr, args.options)
        self.rates = [lr or 0.3] if name == "kfac-kl" else [g["lr"] for g in self.optimizer.param_groups]
        self.held_out = text.evaluation(shape["windows"], shape["context"])
        self.steps, self.spent, self.iterations = 0, 0.0, 0

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in nats."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(tokens[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @property
    def done(self) -> float:
        """Share of the run that is over."""
        return max(self.steps / self.most, self.spent / self.seconds)

    def advance(self) -> None:
        shape = self.args.shape
        tokens = self.text.batch(self.steps, shape["batch"], shape["context"], 0).to(self.device)
        few = tokens[: shape["curvature_batch"]]
        if self.name in GRID:
            share = min((self.done + 0.01) / WARMUP, 1.0, max(1e-6, 1.0 - self.done))
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group |= {"kl_bound": (share * rate) ** 2} if self.name == "kfac-kl" else {"lr": share * rate}
        began = self._now()
        value = self._step(lambda: self.loss(tokens), lambda: self.loss(few))
        self.spent += self._now() - began
        self.steps += 1
        self.iterations += getattr(getattr(self.optimizer, "last_step", None), "cg_iterations", 0)
        if not bool(torch.isfinite(value)):
            raise FloatingPointError(f"the loss is {float(value)}")

    def _step(self, whole: Callable[[], Tensor], part: Callable[[], Tensor]) -> Tensor:
        if self.name != "kfac-kl":
            return optimizers.step(self.optimizer, whole, part)
        assert isinstance(self.optimizer, sorder.KFAC)
        if self.optimizer.curvature_due:
            self.optimizer.update_curvature(part)
        self.optimizer.zero_grad()
        value = whole()
        value.backward()
        self.optimizer.step()
        return value.detach()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Held-out nats per byte."""
        losses = [self.loss(rows.to(self.device)) * len(rows) for rows in self.held_out.split(self.args.shape["batch"])]
        return (torch.stack(losses).sum() / len(self.held_out)).item()

    def point(self) -> dict[str, Any]:
        found: dict[str, Any] = {"step": self.steps, "seconds": self.spent, "held_out": self.evaluate()}
        last = getattr(self.optimizer, "last_step", None)
        for key in ("cg_iterations", "products", "damping", "reduction_ratio", "step_length", "step_norm"):
            if last is not None and hasattr(last, key):
                value = getattr(last, key)
                found[key] = value if math.isfinite(value) else None
        return found

    def run(self) -> dict[str, Any]:
        """Train, evaluating every 1/32; tell what came of it."""
        on_gpu = self.device.type == "cuda"
        curve, error, due, peak = [self.point()], None, 0.0, 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        while self.done < 1.0 and time.perf_counter() < self.until:
            try:
                self.advance()
            except (FloatingPointError, torch.cuda.OutOfMemoryError) as problem:
                error = str(problem).partition("\n")[0]
                break
            if self.done >= due:
                if on_gpu:  # of the steps, not of evaluations
                    peak = max(peak, torch.cuda.max_memory_allocated(self.device))
                curve.append(self.point())
                due = self.done + 1.0 / EVALUATIONS
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats(self.device)
        if error is None and curve[-1]["step"] != self.steps:
            curve.append(self.point())
        return {
            "optimizer": self.name, "lr": self.rates[0], "steps": self.steps, "seconds": self.spent,
            "seconds_per_step": self.spent / max(1, self.steps), "peak_memory": peak if on_gpu else None,
            "cg_iterations": self.iterations, "error": error, "curve": curve,
        }  # fmt: skip

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()


class Comparison:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        began = time.perf_counter()
        self.wall = 60.0 * args.minutes
        self.deadline = began + 0.97 * self.wall
        self.text = corpus.load(None, args.shape["context"])
        self.results: dict[str, Any] = {
            "environment": record.environment(torch.device(args.device), args.commit),
            "configuration": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "out"},
            "runs": [],
        }

    def run(self, name: str, role: str, lr: float | None = None, **limits: float) -> dict[str, Any]:
        """Trains; appends the curve to the results, and writes them."""
        run = {"role": role, **Run(name, self.text, self.args, lr, until=self.deadline, **limits).run()}
        run["cut_short"] = run["steps"] < limits.get("steps", 0) < self.args.steps
        self.results["runs"].append(run)
        print(
            f"{name:<13} {role:<13} lr {run['lr']:<7g} {run['steps']:>5} steps of {run['seconds_per_step']:.3f} s, "
            f"held-out {run['curve'][-1]['held_out']:.4f} nats/byte, {run['cg_iterations']} CG iterations"
            f"{' CUT SHORT' if run['cut_short'] else ''} {run['error'] or ''}",
            flush=True,
        )
        self.results["summary"] = summary(self.results["runs"])
        record.write(self.args.out, self.results)
        plot(self.results["runs"], self.args.out.with_suffix(".png"))
        return run

    def all(self) -> None:
        args = self.args
        for name in args.optimizers:  # first calls compile kernels
            lr = GRID[name][0] if name in GRID else None
            first = Run(name, self.text, args, lr, steps=2)
            first.advance()
            first.advance()
        first_order = [name for name in args.optimizers if name in GRID]
        steps, seconds = float(args.steps), math.inf
        for name in args.optimizers:
            if name not in GRID:
                share = SHARES[name] * (args.seconds / SHARES["hybrid"] if args.seconds else self.wall)
                found = self.run(name, "equal tokens", steps=steps, seconds=share)
                if math.isinf(seconds):
                    steps, seconds = float(found["steps"]), found["seconds"]
        for name in first_order:
            runs = [self.run(name, "equal tokens", lr, steps=steps) for lr in GRID[name][:: args.stride]]
            best = min(runs, key=final)
            if math.isfinite(seconds) and seconds > 1.2 * best["seconds"]:
                for lr in (best["lr"], best["lr"] / 4):
                    self.run(name, "equal seconds", lr, seconds=seconds)
        print(json.dumps(self.results["summary"], indent=1))


def final(run: dict[str, Any]) -> float:
    """Held-out nats per byte at the end; infinite where the run failed, or had no time for its steps."""
    value = run["curve"][-1]["held_out"]
    return value if run["error"] is None and not run["cut_short"] and math.isfinite(value) else math.inf


def best_runs(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best rate of every optimizer in each role."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for run in sorted(runs, key=final):
        found.setdefault((run["optimizer"], run["role"]), run)
    return [found[key] for key in dict.fromkeys((r["optimizer"], r["role"]) for r in runs)]


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Each optimizer's best runs, and the fewest steps and seconds in which AdamW (any rate, any length) is there."""
    table: dict[str, Any] = {}
    for best in best_runs(runs):
        name, role = best["optimizer"], best["role"]
        rates = [r["lr"] for r in runs if (r["optimizer"], r["role"]) == (name, role)]
        there = [
            p for r in runs if r["optimizer"] == "adamw" for p in r["curve"] if p["held_out"] <= final(best)
        ]  # fmt: skip
        row = {
            "held_out": final(best) if math.isfinite(final(best)) else None,
            **{k: best[k] for k in ("lr", "steps", "seconds", "seconds_per_step", "peak_memory", "cg_iterations")},
            "at_the_end_of_the_grid": len(rates) > 2 and best["lr"] in (min(rates), max(rates)),
            "adamw_there_after": None,
        }
        if there and name != "adamw":
            fewest, quickest = min(p["step"] for p in there), min(p["seconds"] for p in there)
            row["adamw_there_after"] = {
                "steps": fewest,
                "seconds": quickest,
                "its steps ÷ ours": fewest / max(1, best["steps"]),
                "our seconds ÷ its": best["seconds"] / max(1e-9, quickest),
            }
        table[f"{name}, {role}"] = row
    return table


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    names = list(dict.fromkeys(r["optimizer"] for r in runs))
    for best in best_runs(runs):
        name, role = best["optimizer"], best["role"]
        for axis, key in zip(axes, ("step", "seconds"), strict=True):
            points = [p for p in best["curve"] if p[key] > 0]
            axis.plot(
                [p[key] for p in points], [p["held_out"] for p in points],
                ".-" if role == "equal tokens" else ".--",
                color=f"C{names.index(name)}", label=f"{name}, {role}, {best['lr']:g}",
            )  # fmt: skip
            axis.set(xlabel={"step": "steps"}.get(key, key), xscale="log")
            axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out nats per byte")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON; PNG beside it; default: benchmarks/results/kfac_gpt[_32k].json")
    parser.add_argument("--commit", help="recorded in the results; default: git's HEAD")
    parser.add_argument("--minutes", type=float, default=5.0, help="wall time; default 5")
    parser.add_argument("--steps", type=int, default=1_000_000, help="at most, for the hybrid; default: as time allows")
    parser.add_argument("--seconds", type=float, help="of the hybrid; default: a tenth of --minutes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", type=json.loads, default={}, help='as in \'{"context": 8192, "batch": 4}\'')
    parser.add_argument(
        "--options", type=json.loads, default={}, help='as in \'{"hybrid": {"cg_iterations": 5}, "kfac": {"lr": 1}}\''
    )
    parser.add_argument("--long", action="store_true", help="one sequence of 32,768 tokens, three rates of each grid")
    default = ["hybrid", "newton-cg", "kfac", "adamw", "muon", "kfac-kl"]
    parser.add_argument(
        "--optimizers", nargs="+", default=default, choices=[*SECOND_ORDER, *GRID], help=f"default: {' '.join(default)}"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    args = parser.parse_args(argv)
    args.shape = {**SHAPE, **(LONG if args.long else {}), **(SMOKE if args.smoke else {}), **args.shape}
    args.out = args.out or Path(f"benchmarks/results/kfac_gpt{'_32k' if args.long else ''}.json")
    args.stride = 2 if args.long or args.smoke else 1
    if args.smoke:
        args.steps, args.minutes, args.seconds = 2, 2.0, args.seconds or 60.0
    torch.set_num_threads(1)
    Comparison(args).all()


if __name__ == "__main__":
    main()
