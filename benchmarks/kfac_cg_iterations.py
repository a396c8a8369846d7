"""Conjugate gradient iterations that a GPT's damped Gauss–Newton systems take behind none, a diagonal, K-FAC and EKFAC.

    python benchmarks/kfac_cg_iterations.py                       # some minutes on a CPU
    python benchmarks/kfac_cg_iterations.py --smoke --out smoke.json

A byte-level GPT is trained by Newton-CG as examples/train_gpt.py has it, without a preconditioner. Before the first
step, and after some, the system (B + λ)x = −g of the next batch, λ being the damping that the optimizer holds there, is
solved from zero to relative residuals of 0.3 to 0.01 behind each preconditioner. When the time is up, no further solve
begins, and what a point lacks is left out.
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
from tqdm import tqdm

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


NAMES = ("none", "diagonal", *KFAC)


class TimeIsUp(Exception):
    """No further solve may begin."""


def make_solver(name: str, point: CurvaturePoint, model: GPT, damping: float) -> Solver:
    """The preconditioner of B + λ at the point."""
    if name == "none":
        return None
    if name == "diagonal":
        diagonal = hutchinson(point.product, point.gradient, torch.Generator().manual_seed(0), probes=30)
        return lambda r: [t / (d.abs() + damping) for t, d in zip(r, diagonal, strict=True)]
    kfac = sorder.KFACPreconditioner(model, least_damping=0.0, **KFAC[name])
    kfac.refresh(point)
    kfac.update(None, damping)
    return kfac


def counts(
    point: CurvaturePoint, solver: Solver, damping: float, most: int, deadline: float, show: Callable[[str], None]
) -> dict[str, int | None]:
    """Iterations to each tolerance; None where ``most`` are not enough. :class:`TimeIsUp` behind the deadline."""
    done = 0

    def damped(v: Sequence[Tensor]) -> list[Tensor]:
        nonlocal done
        done += 1
        show(f"to {tolerance:g}, product {done}")
        return [p + damping * u for p, u in zip(point.product(v), v, strict=True)]

    found: dict[str, int | None] = {}
    for tolerance in TOLERANCES:
        if time.perf_counter() >= deadline:
            raise TimeIsUp
        limit = [Residual(tolerance)]
        result = cg(damped, point.gradient, preconditioner=solver, max_iterations=most, stopping=limit)
        reached = result.residual_norm <= tolerance * result.rhs_norm
        found[f"{tolerance:g}"] = result.iterations if reached else None
        if not reached:
            return found | {f"{t:g}": None for t in TOLERANCES if t < tolerance}
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    deadline = time.perf_counter() + 60.0 * args.minutes
    shape = args.shape
    text = corpus.load(None, shape["context"])
    torch.manual_seed(0)
    model = GPT(256, shape["width"], shape["layers"], shape["heads"]).to(args.device)
    optimizer = optimizers.make("newton-cg", model, None)
    results: dict[str, Any] = {
        "environment": record.environment(torch.device(args.device), args.commit),
        "configuration": {**shape, "parameters": sum(p.numel() for p in model.parameters())},
        "points": [],
    }

    def closure(tokens: Tensor) -> Callable[[], Tensor]:
        return lambda: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    with tqdm(total=len(NAMES) * len(set(args.at)), unit="row") as bar:
        for step in range(max(args.at) + 1):
            if time.perf_counter() >= deadline:
                break
            bar.set_postfix_str(f"step {step} of {max(args.at)}")
            loss = closure(text.batch(step, shape["batch"], shape["context"], 0).to(args.device))
            if step in args.at:
                state = optimizer.param_groups[0]["damping"]
                damping = first_damping(model, loss) if state is None else state
                point = measure_point(model, loss, damping, args.iterations, deadline, bar, step)
                results["points"].append({"step": step, "damping": damping} | point)
                record.write(args.out, results)
                plot(results, args.out.with_suffix(".png"))
            if step < max(args.at):
                optimizers.step(optimizer, loss, loss)
    rows = sum(len(point["iterations"]) for point in results["points"])
    if rows < bar.total:
        print(f"{args.minutes:g} minutes were up after {rows} of {bar.total} rows; --minutes gives more")
    record.write(args.out, results)
    return results


def measure_point(
    model: GPT, loss: Callable[[], Tensor], damping: float, most: int, deadline: float, bar: Any, step: int
) -> dict[str, Any]:
    """The loss, and the iterations behind each preconditioner that the time sufficed for."""
    found: dict[str, dict[str, int | None]] = {}
    with sorder.exact_attention(), CurvaturePoint(loss, list(model.parameters()), "ggn") as point:
        bar.write(f"step {step}, loss {float(point.loss):.3f}, damping {damping:.2e}", file=sys.stdout)
        try:
            for name in NAMES:
                if time.perf_counter() >= deadline:
                    raise TimeIsUp

                def show(what: str, name: str = name) -> None:
                    bar.set_postfix_str(f"step {step}, {name}: {what}")

                show("set up")
                solver = make_solver(name, point, model, damping)
                found[name] = counts(point, solver, damping, most, deadline, show)
                bar.write(f"    {name:<16} {found[name]}", file=sys.stdout)
                bar.update()
        except TimeIsUp:
            pass
        return {"loss": float(point.loss), "iterations": found}


def first_damping(model: GPT, loss: Callable[[], Tensor]) -> float:
    """The λ that Newton-CG starts from; the step that tells it leaves the parameters where they are."""
    probe = sorder.NewtonCG(model.parameters(), lr=0.0, cg_iterations=1)
    probe.step(loss)
    assert probe.last_step is not None
    return probe.last_step.damping


def plot(results: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, tolerance in zip(axes, ("0.1", "0.01"), strict=True):
        for name in NAMES:
            found = [
                (p["step"], p["iterations"][name][tolerance]) for p in results["points"] if name in p["iterations"]
            ]
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
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no further solve begins; default 8")
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
