"""Optimizers on the same tokens: held-out loss against steps, tokens and seconds.

    python benchmarks/train_gpt_compare.py --minutes 6       # one H200: 10.7M parameters at 32,768 tokens of context
    python benchmarks/train_gpt_compare.py --first adamw --rivals sophia-h sophia-g --first-steps 250 --out sophia.json
    python benchmarks/train_gpt_compare.py --smoke --out smoke.json          # any machine, only to see that it runs

By default Newton-CG, as the example has it, untuned, against AdamW and Muon. Every other optimizer runs with a warm-up
and a linear decay to zero: over a grid of learning rates for the first one's number of steps, and with the grid's best
rate, and a quarter of it, once more for as many seconds as the first one took. Step n sees the same windows of text in
every run. Seconds are those of the steps, evaluation left out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import record
import train_gpt

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GRID: dict[str, list[float | None]] = {
    "newton-cg": [None],  # its default
    "adamw": [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3],
    "muon": [1e-2, 2e-2, 4e-2, 8e-2, 1.6e-1],
    "sophia-h": [2e-4, 4e-4, 8e-4, 1.6e-3],
    "sophia-g": [2e-4, 4e-4, 8e-4, 1.6e-3],
}
FIRST_SHARE = 0.15  # of the wall budget; each rival's long runs take as much, and the rest is for the grids


class Comparison:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.text: train_gpt.corpus.Corpus | None = None
        self.deadline = time.perf_counter() + 60 * args.minutes
        self.results: dict[str, Any] = {
            "environment": record.environment(torch.device(args.device), args.commit),
            "configuration": {k: v.name if isinstance(v, Path) else v for k, v in vars(args).items()},
            "runs": [],
        }

    def run(
        self, optimizer: str, role: str, lr: float | None, steps: int, seconds: float = math.inf, **options: Any
    ) -> dict[str, Any]:
        """Trains for ``steps``, or until ``seconds`` or the wall budget are spent; appends the curve to the results."""
        arguments = [f"--{k}={v}" for k, v in self.args.shape.items()] + [f"--device={self.args.device}"]
        arguments += [f"--optimizer={optimizer}", f"--steps={steps}"] + ([] if lr is None else [f"--lr={lr}"])
        training = train_gpt.Run(train_gpt.parse(arguments), self.text, **options)
        self.text = training.corpus
        rates = training.rates
        self.results["configuration"]["parameters"] = sum(p.numel() for p in training.model.parameters())
        self.results["configuration"]["tokens per step"] = training.args.batch * training.args.context
        every = 1 if optimizer == "newton-cg" else max(1, steps // self.args.evaluations)
        curve = [self._point(training, 0.0, None)]
        spent, error = 0.0, None
        while training.step < steps and spent < seconds and time.perf_counter() < self.deadline:
            if optimizer != "newton-cg":
                training.rates = [rate * (1 - training.step / steps) for rate in rates]
            began = self._now()
            try:
                loss = training.advance()
            except FloatingPointError as diverged:
                error = str(diverged)
                break
            spent += self._now() - began
            if training.step % every == 0 or training.step == steps:
                curve.append(self._point(training, spent, loss))
        run = {
            "optimizer": optimizer, "role": role, "lr": rates[0], "steps": training.step, "seconds": spent,
            "curve": curve, "options": options, "error": error,
            "truncated": spent < seconds and training.step < steps and not error,
        }  # fmt: skip
        self.results["runs"].append(run)
        record.write(self.args.out, self.results)
        per_step = spent / max(training.step, 1)
        print(
            f"{optimizer:<10} {role:<13} lr {rates[0]:<8} {training.step:>5} steps of "
            f"{per_step:.3f} s, held-out {curve[-1]['held_out']:.4f} bits/byte {error or ''}",
            flush=True,
        )
        return run

    def _point(self, training: train_gpt.Run, seconds: float, loss: float | None) -> dict[str, Any]:
        tokens = training.step * training.args.batch * training.args.context
        point: dict[str, Any] = {"step": training.step, "tokens": tokens, "seconds": seconds, "train_nats": loss}
        point["held_out"] = training.evaluate()
        last = getattr(training.optimizer, "last_step", None)
        if training.args.optimizer == "newton-cg" and last is not None:
            keys = ("cg_iterations", "products", "damping", "reduction_ratio", "step_length", "accepted")
            point |= {key: getattr(last, key) for key in keys}
        return point

    def _now(self) -> float:
        if self.args.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    def all(self) -> None:
        args = self.args
        for optimizer in (args.first, *args.rivals):  # first calls compile kernels
            self.run(optimizer, "warm-up", None, 2)
        self.results["runs"].clear()
        share = FIRST_SHARE * 60 * args.minutes
        grid = GRID[args.first][:: args.grid_stride]
        firsts = [self.run(args.first, "same tokens", lr, args.first_steps, share, **args.first_options) for lr in grid]
        first = min(firsts, key=final)
        for rival in args.rivals:
            tuned = [self.run(rival, "same tokens", lr, first["steps"]) for lr in GRID[rival][:: args.grid_stride]]
            best = min(tuned, key=final)
            if math.isinf(final(best)):
                print(f"no rate of {rival}'s grid came to its end within {args.minutes} minutes")
                continue
            steps = int(first["seconds"] * best["steps"] / best["seconds"])
            for lr in (best["lr"], best["lr"] / 4) if steps > 1.2 * first["steps"] else ():
                self.run(rival, "same seconds", lr, steps, 1.1 * first["seconds"])
        self.results["summary"] = summary(self.results["runs"], args.first)
        record.write(args.out, self.results)
        plot(self.results, args.out.with_suffix(".png"))
        print(json.dumps(self.results["summary"], indent=1))


def final(run: dict[str, Any]) -> float:
    """Held-out bits per byte at the end; infinite where the run diverged or the wall budget cut it short."""
    value = run["curve"][-1]["held_out"]
    return math.inf if run["error"] or run["truncated"] or not math.isfinite(value) else value


def summary(runs: list[dict[str, Any]], first: str) -> dict[str, Any]:
    """Where each optimizer ends at equal tokens and equal seconds, and when a rival first is where the first ends."""
    table: dict[str, Any] = {}
    for run in best_runs(runs):
        table[f"{run['optimizer']}, {run['role']}"] = _end(run)
    goal = table[f"{first}, same tokens"]["held_out"]
    for rival in {run["optimizer"]: None for run in runs if run["optimizer"] != first}:
        reached = [p for run in runs if run["optimizer"] == rival for p in run["curve"] if p["held_out"] <= goal]
        if reached:
            table[f"{rival}, first at {first}'s loss"] = {
                "steps": min(p["step"] for p in reached),
                "seconds": min(p["seconds"] for p in reached),
            }
    return table


def best_runs(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best rate of every optimizer in each role."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for run in sorted(runs, key=final):
        if final(run) < math.inf:
            found.setdefault((run["optimizer"], run["role"]), run)
    return list(found.values())


def _end(run: dict[str, Any]) -> dict[str, Any]:
    return {"held_out": final(run), **{key: run[key] for key in ("lr", "steps", "seconds")}}


def plot(results: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), sharey=True)
    shown = best_runs(results["runs"])
    names = list(dict.fromkeys(run["optimizer"] for run in results["runs"]))
    for axis, key in zip(axes, ("step", "tokens", "seconds"), strict=True):
        for run in shown:
            curve = [p for p in run["curve"] if p[key] > 0]
            style = "--" if run["role"] == "same tokens" else "-"
            label = f"{run['optimizer']}, {run['role']}, lr {run['lr']:g}"
            axis.plot(
                [p[key] for p in curve], [p["held_out"] for p in curve], style,
                color=f"C{names.index(run['optimizer'])}", label=label, marker=".",
            )  # fmt: skip
        axis.set(xlabel={"step": "steps"}.get(key, key), xscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out bits per byte")
    axes[0].legend(fontsize=8)
    where, what = results["environment"], results["configuration"]
    figure.suptitle(
        f"{what['parameters'] / 1e6:.1f}M parameters, {what['tokens per step']} tokens a step, {where['device']}"
    )
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/train_gpt_32k.json"), help="JSON; a PNG beside it"
    )
    parser.add_argument("--commit", help="recorded in the results; default: git's HEAD")
    parser.add_argument("--minutes", type=float, default=6.0, help="wall budget")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", type=json.loads, default={}, help="train_gpt options, as in '{\"context\": 8192}'")
    parser.add_argument("--first", default="newton-cg", choices=GRID, help="sets the number of steps and seconds")
    parser.add_argument("--rivals", nargs="*", default=["adamw", "muon"], choices=GRID)
    parser.add_argument("--first-steps", type=int, default=100_000, help="at most; default: as its share allows")
    parser.add_argument("--first-options", type=json.loads, default={}, help="as in '{\"cg_iterations\": 10}'")
    parser.add_argument("--evaluations", type=int, default=16, help="of the held-out loss in a rival's run")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    args = parser.parse_args(argv)
    args.grid_stride = 1
    if args.smoke:
        args.shape = {"context": 16, "batch": 2, "layers": 1, "width": 16, "heads": 2, "windows": 2}
        args.first_steps, args.grid_stride, args.minutes, args.evaluations = 3, 3, 0.5, 3
    return args


if __name__ == "__main__":
    Comparison(parse(None)).all()
