"""Newton-CG, AdamW and Muon on the same tokens: held-out loss against steps, tokens and seconds.

    python benchmarks/train_gpt_compare.py --minutes 6       # one H200: 10.7M parameters at 32,768 tokens of context
    python benchmarks/train_gpt_compare.py --smoke --out smoke.json          # any machine, only to see that it runs

Newton-CG runs as the example has it, untuned. Each rival runs with a warm-up and a linear decay to zero: over a grid of
learning rates for Newton-CG's number of steps, and with the grid's best rate once more for as many seconds as Newton-CG
took. Step n sees the same windows of text in every run. Seconds are those of the steps, evaluation left out.
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

GRID = {"adamw": [3e-4, 1e-3, 2e-3, 4e-3, 8e-3], "muon": [3e-3, 1e-2, 2e-2, 4e-2, 8e-2]}
NEWTON_SHARE = 0.2  # of the wall budget; each rival's long run takes as much, and the rest is for the grids


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
        if last is not None:
            keys = ("cg_iterations", "products", "damping", "reduction_ratio", "step_length", "accepted")
            point |= {key: getattr(last, key) for key in keys}
        return point

    def _now(self) -> float:
        if self.args.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    def all(self) -> None:
        args = self.args
        for optimizer in ("newton-cg", "adamw", "muon"):  # first calls compile kernels
            self.run(optimizer, "warm-up", None, 2)
        self.results["runs"].clear()
        share = NEWTON_SHARE * 60 * args.minutes
        newton = self.run("newton-cg", "defaults", None, args.newton_steps, share, **args.newton_options)
        for rival, grid in GRID.items():
            tuned = [self.run(rival, "same tokens", lr, newton["steps"]) for lr in grid[:: args.grid_stride]]
            best = min(tuned, key=final)
            if math.isinf(final(best)):
                print(f"no rate of {rival}'s grid came to its end within {args.minutes} minutes")
                continue
            steps = max(newton["steps"], int(newton["seconds"] * best["steps"] / best["seconds"]))
            self.run(rival, "same seconds", best["lr"], steps, 1.1 * newton["seconds"])
        self.results["summary"] = summary(self.results["runs"])
        record.write(args.out, self.results)
        plot(self.results, args.out.with_suffix(".png"))
        print(json.dumps(self.results["summary"], indent=1))


def final(run: dict[str, Any]) -> float:
    """Held-out bits per byte at the end; infinite where the run diverged or the wall budget cut it short."""
    value = run["curve"][-1]["held_out"]
    return math.inf if run["error"] or run["truncated"] or not math.isfinite(value) else value


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Where each optimizer ends at equal tokens and equal seconds, and when a rival first is where Newton-CG ends."""
    newton = next(run for run in runs if run["optimizer"] == "newton-cg")
    table: dict[str, Any] = {"newton-cg": _end(newton)}
    for rival in GRID:
        own = [run for run in runs if run["optimizer"] == rival]
        for role in ("same tokens", "same seconds"):
            among = [run for run in own if run["role"] == role and not math.isinf(final(run))]
            if among:
                table[f"{rival}, {role}"] = _end(min(among, key=final))
        reached = [p for run in own for p in run["curve"] if p["held_out"] <= final(newton)]
        if reached:
            table[f"{rival}, first at newton-cg's loss"] = {
                "steps": min(p["step"] for p in reached),
                "seconds": min(p["seconds"] for p in reached),
            }
    return table


def _end(run: dict[str, Any]) -> dict[str, Any]:
    return {"held_out": final(run), **{key: run[key] for key in ("lr", "steps", "seconds")}}


def plot(results: dict[str, Any], path: Path) -> None:
    runs = results["runs"]
    shown = [run for run in runs if run["role"] in ("defaults", "same seconds")]
    for rival in GRID:
        grid = [r for r in runs if r["optimizer"] == rival and r["role"] == "same tokens" and final(r) < math.inf]
        shown += sorted(grid, key=final)[:1]
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), sharey=True)
    colours = {"newton-cg": "C3", "adamw": "C0", "muon": "C2"}
    for axis, key in zip(axes, ("step", "tokens", "seconds"), strict=True):
        for run in shown:
            curve = [p for p in run["curve"] if p[key] > 0]
            style = "--" if run["role"] == "same tokens" else "-"
            label = f"{run['optimizer']}, {run['role']}, lr {run['lr']:g}"
            axis.plot(
                [p[key] for p in curve], [p["held_out"] for p in curve], style,
                color=colours[run["optimizer"]], label=label, marker=".",
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
    parser.add_argument(
        "--newton-steps", type=int, default=100_000, help="at most; default: as its share of the budget allows"
    )
    parser.add_argument("--newton-options", type=json.loads, default={}, help="as in '{\"cg_iterations\": 10}'")
    parser.add_argument("--evaluations", type=int, default=16, help="of the held-out loss in a rival's run")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    args = parser.parse_args(argv)
    args.grid_stride = 1
    if args.smoke:
        args.shape = {"context": 16, "batch": 2, "layers": 1, "width": 16, "heads": 2, "windows": 2}
        args.newton_steps, args.grid_stride, args.minutes, args.evaluations = 3, 3, 0.5, 3
    return args


if __name__ == "__main__":
    Comparison(parse(None)).all()
