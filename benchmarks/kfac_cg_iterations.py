"""Conjugate gradient iterations that a GPT's damped Gauss–Newton systems take behind none, a diagonal, K-FAC and EKFAC.

    python benchmarks/kfac_cg_iterations.py                       # some minutes on a CPU
    python benchmarks/kfac_cg_iterations.py --smoke --out smoke.json

A byte-level GPT is trained by Newton-CG as examples/train_gpt.py has it, without a preconditioner. Before the first
step, and after some, the system (B + λ)x = −g of the next batch, λ being the damping that the optimizer holds there, is
solved from zero to relative residuals of 0.3 to 0.01 behind each preconditioner.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import corpus
import optimizers
import record
from gpt import GPT

import sorder
from sorder.curvature import CurvaturePoint
from sorder.curvature.diagonal import hutchinson
from sorder.linalg import Residual, cg

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SHAPE = {"context": 64, "batch": 64, "layers": 2, "width": 64, "heads": 4}
SMOKE = {"context": 16, "batch": 4, "layers": 1, "width": 16, "heads": 2}
TOLERANCES = (0.3, 0.1, 0.03, 0.01)
KFAC: dict[str, dict[str, Any]] = {
    "kfac": {"inverse": "cholesky"},
    "kfac, 8 samples": {"inverse": "cholesky", "samples": 8},
    "kfac, eigen": {"inverse": "eigen", "samples": 8},
    "ekfac": {"inverse": "ekfac", "samples": 8},
}
Solver = Callable[[Sequence[Tensor]], Sequence[Tensor]] | None


def solvers(point: CurvaturePoint, model: GPT, damping: float) -> dict[str, Solver]:
    """Preconditioners of B + λ at the point."""
    diagonal = hutchinson(point.product, point.gradient, torch.Generator().manual_seed(0), probes=30)
    found: dict[str, Solver] = {
        "none": None,
        "diagonal": lambda r: [t / (d.abs() + damping) for t, d in zip(r, diagonal, strict=True)],
    }
    for name, options in KFAC.items():
        kfac = sorder.KFACPreconditioner(model, least_damping=0.0, **options)
        kfac.refresh(point)
        kfac.update(None, damping)
        found[name] = kfac
    return found


def counts(point: CurvaturePoint, solver: Solver, damping: float, most: int) -> dict[str, int | None]:
    """Iterations to each tolerance; None where ``most`` are not enough."""

    def damped(v: Sequence[Tensor]) -> list[Tensor]:
        return [p + damping * u for p, u in zip(point.product(v), v, strict=True)]

    found: dict[str, int | None] = {}
    for tolerance in TOLERANCES:
        limit = [Residual(tolerance)]
        result = cg(damped, point.gradient, preconditioner=solver, max_iterations=most, stopping=limit)
        reached = result.residual_norm <= tolerance * result.rhs_norm
        found[f"{tolerance:g}"] = result.iterations if reached else None
        if not reached:
            return found | {f"{t:g}": None for t in TOLERANCES if t < tolerance}
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    shape = args.shape
    text = corpus.load(None, shape["context"])
    torch.manual_seed(0)
    model = GPT(256, shape["width"], shape["layers"], shape["heads"]).to(args.device)
    params = list(model.parameters())
    optimizer = optimizers.make("newton-cg", model, None)
    results: dict[str, Any] = {
        "environment": record.environment(torch.device(args.device), args.commit),
        "configuration": {**shape, "parameters": sum(p.numel() for p in params)},
        "points": [],
    }

    def closure(tokens: Tensor) -> Callable[[], Tensor]:
        return lambda: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    deadline = time.perf_counter() + 60.0 * args.minutes
    for step in range(max(args.at) + 1):
        loss = closure(text.batch(step, shape["batch"], shape["context"], 0).to(args.device))
        if step in args.at and time.perf_counter() < deadline:
            state = optimizer.param_groups[0]["damping"]
            damping = first_damping(model, loss) if state is None else state
            with sorder.exact_attention(), CurvaturePoint(loss, params, "ggn") as point:
                found = {
                    name: counts(point, solver, damping, args.iterations)
                    for name, solver in solvers(point, model, damping).items()
                }
                results["points"].append(
                    {"step": step, "loss": float(point.loss), "damping": damping, "iterations": found}
                )
            print(f"step {step}, loss {results['points'][-1]['loss']:.3f}, damping {damping:.2e}")
            for name, row in found.items():
                print(f"    {name:<16} {row}", flush=True)
            record.write(args.out, results)
            plot(results, args.out.with_suffix(".png"))
        optimizers.step(optimizer, loss, loss)
    return results


def first_damping(model: GPT, loss: Callable[[], Tensor]) -> float:
    """The λ that Newton-CG starts from; the step that tells it leaves the parameters where they are."""
    probe = sorder.NewtonCG(model.parameters(), lr=0.0, cg_iterations=1)
    probe.step(loss)
    assert probe.last_step is not None
    return probe.last_step.damping


def plot(results: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, tolerance in zip(axes, ("0.1", "0.01"), strict=True):
        for name in results["points"][0]["iterations"]:
            found = [(p["step"], p["iterations"][name][tolerance]) for p in results["points"]]
            shown = [(x, y) for x, y in found if y]
            axis.plot([x for x, _ in shown], [y for _, y in shown], "o-", label=name)
        axis.set(xlabel="steps of Newton-CG before", yscale="log", title=f"relative residual {tolerance}")
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("CG iterations")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/kfac_cg_iterations.json"), help="JSON; PNG beside it"
    )
    parser.add_argument("--commit", help="recorded in the results; default: git's HEAD")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which nothing more is measured; default 8")
    parser.add_argument("--shape", type=json.loads, default={}, help='as in \'{"context": 256, "width": 128}\'')
    parser.add_argument("--at", type=int, nargs="+", default=[0, 5, 10, 15, 20], help="steps to measure after")
    parser.add_argument("--iterations", type=int, default=300, help="at most; default 300")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    args = parser.parse_args(argv)
    args.shape = {**SHAPE, **(SMOKE if args.smoke else {}), **args.shape}
    if args.smoke:
        args.at, args.iterations = [0, 1], 20
    torch.set_num_threads(1)
    measure(args)


if __name__ == "__main__":
    main()
