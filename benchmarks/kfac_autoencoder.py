"""Six optimizers on the deep autoencoder of examples/autoencoder.py: training error against steps and seconds.

    python benchmarks/kfac_autoencoder.py --seconds 60                        # each run; a grid of rates costs as often
    python benchmarks/kfac_autoencoder.py --smoke --out smoke.json            # only to see that it runs

First-order optimizers run over a grid of learning rates (and SGD over two momenta), each for the same seconds; K-FAC,
Newton-CG and the hybrid run as they come. Step n sees the same images in every run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import autoencoder
import record

GRID: dict[str, list[dict[str, Any]]] = {
    "sgd": [{"lr": lr, "momentum": m} for m in (0.9, 0.99) for lr in (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)],
    "adamw": [{"lr": lr} for lr in (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)],
    "shampoo": [{"lr": lr} for lr in (1e-2, 3e-2, 1e-1, 3e-1, 1.0)],
    "newton-cg": [{}],
    "kfac": [{}],
    "hybrid": [{}],
}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Every run, and each optimizer's best; written to ``args.out`` after every run."""
    arguments = ["--quiet", f"--seconds={args.seconds}", f"--steps={args.steps}", f"--device={args.device}"]
    settings = autoencoder.parse([*arguments, *args.settings])
    results: dict[str, Any] = {
        "environment": record.environment(torch.device(args.device), args.commit),
        "settings": {k: v for k, v in vars(settings).items() if k not in ("out", "optimizer", "lr", "quiet")},
        "runs": [],
    }
    for name, grid in GRID.items():
        for options in grid[:: args.stride]:
            run = autoencoder.Training(name, settings, **options).run()
            results["runs"].append({**run, "options": options})
            print(f"{name:<10} {options!s:<34} {run['steps']:>6} steps, error {run['error']:.4f} {run['failed'] or ''}")
            record.write(args.out, results)
    results["best"] = {name: summary([r for r in results["runs"] if r["optimizer"] == name]) for name in GRID}
    record.write(args.out, results)
    shown = [min((r for r in results["runs"] if r["optimizer"] == name), key=final) for name in GRID]
    autoencoder.plot(shown, args.out.with_suffix(".png"))
    return results


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
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kfac_autoencoder.json"))
    parser.add_argument("--commit", help="recorded in the results; default: git's HEAD")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training in each run")
    parser.add_argument("--steps", type=int, default=1_000_000, help="at most, in each run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--settings", nargs=argparse.REMAINDER, default=[], help="the rest goes to autoencoder.py")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    args = parser.parse_args(argv)
    args.stride = 1
    if args.smoke:
        args.steps, args.stride = 3, 5
        args.settings = ["--side=6", "--widths", "8", "5", "3", "2", "--images=40", "--batch=40"]
    print(json.dumps(compare(args)["best"], indent=1))


if __name__ == "__main__":
    main()
