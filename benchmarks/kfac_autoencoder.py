"""Optimizers on the deep autoencoder of examples/autoencoder.py: training error against steps and seconds.

    python benchmarks/kfac_autoencoder.py --minutes 4                        # a GPU: 28×28 images, the classic widths
    python benchmarks/kfac_autoencoder.py --device cpu --minutes 6           # smaller
    python benchmarks/kfac_autoencoder.py --smoke --out smoke.json           # only to see that it runs

First-order optimizers run over a grid of learning rates (and SGD over two momenta), Newton-CG, K-FAC and the hybrid of
both with settings lightly tuned on this very problem, each for the same share of the time. Step n sees the same images
in every run. Seconds are those of the steps; on a CPU those that one thread computes, so that work beside it does not
count. Results are written after every run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import autoencoder
import record

GRID: dict[str, list[dict[str, Any]]] = {
    "kfac": [{}],
    "hybrid": [{}],
    "newton-cg": [{}],
    "adamw": [{"lr": lr} for lr in (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)],
    "sgd": [{"lr": lr, "momentum": m} for m in (0.9, 0.99) for lr in (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)],
    "shampoo": [{"lr": lr} for lr in (1e-2, 3e-2, 1e-1, 3e-1, 1.0)],
}
SETTINGS = {
    "cuda": ["--side=28", "--widths", "400", "200", "100", "6", "--images=20000", "--batch=2000"],
    "cpu": ["--side=16", "--widths", "128", "64", "32", "6", "--images=2000", "--batch=500"],
}
SMOKE = ["--side=6", "--widths", "8", "5", "3", "2", "--images=40", "--batch=40"]
SHARE = 0.85  # of the wall time that is for steps; the rest is for first calls and evaluations


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Every run, and each optimizer's best; written to ``args.out`` after every run."""
    known = importlib.util.find_spec("torch_optimizer") is not None
    chosen = [(name, options) for name in args.optimizers for options in GRID[name][:: args.stride]]
    chosen = [(name, options) for name, options in chosen if name != "shampoo" or known]
    seconds = SHARE * 60.0 * args.minutes / len(chosen)
    kind = "cuda" if args.device.startswith("cuda") else "cpu"
    arguments = ["--quiet", f"--seconds={seconds}", f"--steps={args.steps}", f"--device={args.device}"]
    settings = autoencoder.parse([*arguments, *(SMOKE if args.smoke else SETTINGS[kind]), *args.settings])
    clock = time.perf_counter if kind == "cuda" else time.process_time
    results: dict[str, Any] = {
        "environment": record.environment(torch.device(args.device), args.commit),
        "settings": {k: v for k, v in vars(settings).items() if k not in ("out", "optimizer", "lr", "quiet")},
        "left out": [] if known else ["shampoo: torch-optimizer is not installed"],
        "runs": [],
    }
    warm = autoencoder.parse([*arguments, *SMOKE, "--steps=2"])
    for name in dict.fromkeys(name for name, _ in chosen):  # first calls load libraries
        autoencoder.Training(name, warm, clock=clock).run()
    for name, options in chosen:
        run = autoencoder.Training(name, settings, clock=clock, **options).run()
        results["runs"].append({**run, "options": options})
        print(
            f"{name:<10} {options!s:<34} {run['steps']:>6} steps, {run['seconds']:5.1f} s, error {run['error']:.4f} "
            f"{run['failed'] or ''}",
            flush=True,
        )
        finish(results, args.out)
    return results


def finish(results: dict[str, Any], out: Path) -> None:
    """Write what there is so far, and plot it."""
    names = dict.fromkeys(r["optimizer"] for r in results["runs"])
    results["best"] = {name: summary([r for r in results["runs"] if r["optimizer"] == name]) for name in names}
    record.write(out, results)
    shown = [min((r for r in results["runs"] if r["optimizer"] == name), key=final) for name in names]
    autoencoder.plot(shown, out.with_suffix(".png"))


def final(run: dict[str, Any]) -> float:
    """Error at the end; infinite where the run failed."""
    return run["error"] if run["failed"] is None and math.isfinite(run["error"]) else math.inf


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The best of a grid. ``at_the_end_of_the_grid`` warns that a better rate may lie outside."""
    best = min(runs, key=final)
    rates = [r["lr"] for r in runs]
    return {
        **{k: best[k] for k in ("options", "steps", "seconds", "error")},
        "at_the_end_of_the_grid": len(set(rates)) > 1 and best["lr"] in (min(rates), max(rates)),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/kfac_autoencoder.json"), help="JSON; PNG beside it"
    )
    parser.add_argument("--commit", help="recorded in the results; default: git's HEAD")
    parser.add_argument("--minutes", type=float, default=4.0, help="wall time, shared evenly by the runs; default 4")
    parser.add_argument("--steps", type=int, default=1_000_000, help="at most, in each run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--optimizers", nargs="+", choices=GRID, default=list(GRID), help="default: all")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--settings", nargs=argparse.REMAINDER, default=[], help="the rest goes to autoencoder.py")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    args.stride = 1
    if args.smoke:
        args.steps, args.stride = 3, 5
    print(json.dumps(compare(args)["best"], indent=1))


if __name__ == "__main__":
    main()
