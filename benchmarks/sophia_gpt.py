"""Sophia against a tuned AdamW on the same tokens: held-out loss of a byte-level GPT against steps and seconds.

    python benchmarks/sophia_gpt.py                       # one H200, 5½ minutes: 10.7M parameters, 32,768 tokens
    python benchmarks/sophia_gpt.py --device cpu --minutes 20 --out proxy.json         # a small model on a CPU
    python benchmarks/sophia_gpt.py --smoke --out smoke.json                           # any machine: does it run?

First short runs: AdamW over a grid of learning rates; then each Sophia, after a probe that shows how |m|/h is
distributed: over multiples of AdamW's best rate with the gamma that leaves 15 % of the coordinates unclipped (the win
rate; the paper wants 10 to 50 %), and at the best of these rates and its double with the gamma that leaves 40 %. Then
long runs at equal tokens of every optimizer's best setting, and of the next best ones as far as the time goes. All
have a linear warm-up and a cosine decay to a tenth, gradients clipped to norm 1, and see the same windows of text at
step n.

Sophia's betas are AdamW's here, lower than its defaults: in 300 steps of a small model on a CPU 0.9 is much better than
0.965 (3.68 against 4.03 bits); and h begins at zero and comes to its level in update_interval/(1 − beta) steps, which
is 1000 by default, longer than these runs.

The JSON is written as it goes. Called again with the same options it goes on after the last run that came to its end.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sorder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import corpus
import record
from gpt import GPT

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIZES: dict[str, dict[str, int]] = {
    "cuda": {"context": 32_768, "layers": 6, "width": 384, "heads": 6, "windows": 4, "short": 100, "long": 600},
    "cpu": {"context": 1024, "layers": 4, "width": 128, "heads": 4, "windows": 16, "short": 100, "long": 300},
    "smoke": {"context": 32, "layers": 1, "width": 16, "heads": 2, "windows": 2, "short": 12, "long": 14},
}
ADAMW_BETAS = (0.9, 0.95)
ADAMW_RATES = [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]
SOPHIAS = {"SophiaG": sorder.SophiaG, "SophiaH": sorder.SophiaH}
RATE_FACTORS = [0.1, 0.2, 0.4, 0.8]  # of AdamW's best; the paper takes 0.8 of it
PROBE = {"factor": 0.2, "gamma": 0.3}
WIN_RATES = (0.15, 0.4)
WARMUP = 0.1  # of a run
DECAY = {"AdamW": 0.1, "SophiaG": 0.2, "SophiaH": 0.2}  # the paper's


@dataclass(frozen=True)
class Setting:
    """What one run is: its name in the results, too."""

    optimizer: str
    lr: float
    steps: int
    gamma: float | None = None

    def make(self, model: nn.Module, betas: tuple[float, float]) -> Any:
        options: dict[str, Any] = {"lr": self.lr, "weight_decay": DECAY[self.optimizer]}
        if self.optimizer == "AdamW":
            fused = next(model.parameters()).is_cuda
            return torch.optim.AdamW(model.parameters(), betas=ADAMW_BETAS, fused=fused, **options)
        return SOPHIAS[self.optimizer](model.parameters(), betas=betas, gamma=self.gamma, **options)


class Comparison:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.deadline = time.perf_counter() + 60 * args.minutes
        self.corpus = corpus.load(args.data, args.context)
        self.held_out = self.corpus.evaluation(args.windows, args.context).to(self.device)
        kept = ("context", "layers", "width", "heads", "windows", "short", "long", "betas", "curvature_tokens", "seed")
        configuration = {name: getattr(args, name) for name in kept} | {"text": self.corpus.fingerprint}
        self.pace: dict[str, float] = {}  # seconds of a step, evaluations included
        self.results: dict[str, Any] = {
            "environment": record.environment(self.device, args.commit),
            "configuration": configuration,
            "runs": [],
        }
        if args.out.exists():
            before = json.loads(args.out.read_text())
            if before["configuration"] != json.loads(json.dumps(configuration)):
                raise SystemExit(f"{args.out} holds runs of another configuration; choose another --out or remove it")
            self.results["runs"] = before["runs"]

    def run(self, setting: Setting) -> dict[str, Any] | None:
        """The run of this setting, from the results if it is there; None where the time does not suffice."""
        for done in self.results["runs"]:
            if done["setting"] == asdict(setting):
                return done
        began = time.perf_counter()
        if began + self.pace.get(setting.optimizer, 0.0) * setting.steps > self.deadline:
            return None
        run: dict[str, Any] = {"setting": asdict(setting), "seconds": 0.0, "error": None, "curve": []}
        if setting.optimizer in SOPHIAS:
            run |= {"win_rates": [], "gammas": []}
        self.results["unfinished"] = run
        try:
            if not self.train(setting, run):
                return None
        except FloatingPointError as diverged:
            run["error"] = str(diverged)
        self.pace[setting.optimizer] = (time.perf_counter() - began) / setting.steps
        self.results["runs"].append(self.results.pop("unfinished"))
        self.save()
        rates = f", win rate {min(run['win_rates']):.3f} to {max(run['win_rates']):.3f}" if run.get("win_rates") else ""
        gamma = "" if setting.gamma is None else f" gamma {setting.gamma:<8.3g}"
        print(
            f"{setting.optimizer:<8} lr {setting.lr:<8.2g}{gamma} {setting.steps:>5} steps of "
            f"{run['seconds'] / setting.steps:.4f} s: {final(run):.4f} bits/byte{rates} {run['error'] or ''}",
            flush=True,
        )
        return run

    def train(self, setting: Setting, run: dict[str, Any]) -> bool:
        """Fills ``run``; False if the time was over before its end."""
        args, device = self.args, self.device
        torch.manual_seed(args.seed)
        model = GPT(256, args.width, args.layers, args.heads).to(device)
        self.results["parameters"] = sum(p.numel() for p in model.parameters())
        optimizer = setting.make(model, tuple(args.betas))
        sophia, sampled = setting.optimizer in SOPHIAS, setting.optimizer == "SophiaG"
        run["curve"].append({"step": 0, "seconds": 0.0, "held_out": self.evaluate(model)})
        every = max(1, setting.steps // args.evaluations)
        for step in range(setting.steps):
            began = self.now()
            if began > self.deadline:
                return False
            tokens = self.corpus.batch(step, 1, args.context, args.seed).to(device)
            for group in optimizer.param_groups:
                group["lr"] = setting.lr * schedule(step, setting.steps)
            if sophia and optimizer.curvature_due:
                few = tokens[:, : args.curvature_tokens[setting.optimizer] + 1]
                optimizer.update_curvature(lambda few=few: self.loss(model, few, sampled))
            optimizer.zero_grad()
            self.loss(model, tokens).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            run["seconds"] += self.now() - began
            if (step + 1) % every == 0 or step + 1 == setting.steps:
                point = {"step": step + 1, "seconds": run["seconds"], "held_out": self.evaluate(model)}
                run["curve"].append(point)
                if sophia:
                    run["win_rates"].append(optimizer.last_step.win_rate)
                    run["gammas"].append(gammas(optimizer, WIN_RATES))
                self.save()
        return True

    def loss(self, model: nn.Module, tokens: Tensor, sample_labels: bool = False) -> Any:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = model(tokens[:, :-1])
            if sample_labels:
                return sorder.gnb_loss(logits)
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Held-out bits per byte."""
        return float(sum(self.loss(model, row[None]) for row in self.held_out)) / len(self.held_out) / math.log(2)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def save(self) -> None:
        record.write(self.args.out, self.results)

    def all(self) -> None:
        short = self.args.short
        adamw = self.best([Setting("AdamW", lr, short) for lr in ADAMW_RATES])
        ranked = {"AdamW": adamw}
        for name in SOPHIAS if adamw else ():
            ranked[name] = self.tuned(name, adamw[0].lr)
        for place in range(max(map(len, ranked.values()))):
            for settings in ranked.values():
                if place < len(settings):
                    s = settings[place]
                    self.run(Setting(s.optimizer, s.lr, self.args.long, s.gamma))
        self.results["summary"] = summary(self.results["runs"], self.args.long)
        self.save()
        plot(self.results, self.args.out.with_suffix(".png"))
        print(json.dumps(self.results["summary"], indent=1))

    def tuned(self, name: str, rate: float) -> list[Setting]:
        """Settings of one of :data:`SOPHIAS` that came to their end, the best first; ``rate`` is AdamW's best."""
        probe = Setting(name, PROBE["factor"] * rate, self.args.short, PROBE["gamma"])
        probed = self.run(probe)
        if probed is None:
            return []
        # Of the middle of the run: at its beginning h is small, at its end m.
        few, many = (statistics.median(g[i] for g in probed["gammas"]) for i in range(2))
        ranked = self.best([probe, *(Setting(name, factor * rate, self.args.short, few) for factor in RATE_FACTORS)])
        again = [Setting(name, factor * ranked[0].lr, self.args.short, many) for factor in (1.0, 2.0)] if ranked else []
        return self.best([*ranked, *again])

    def best(self, settings: list[Setting]) -> list[Setting]:
        """Those that came to their end, the best first."""
        runs = [(final(run), i) for i, s in enumerate(settings) if (run := self.run(s)) is not None]
        return [settings[i] for value, i in sorted(runs) if math.isfinite(value)]


def schedule(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine to a tenth, as a factor of the peak."""
    warm = max(1, int(WARMUP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


@torch.no_grad()
def gammas(optimizer: Any, shares: Sequence[float]) -> list[float]:
    """Values of gamma at which these shares of the coordinates would not be clipped now: quantiles of |m| / h."""
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    ratio = torch.cat([(s["exp_avg"].abs() / s["hessian"].clamp_min(1e-30)).flatten() for s in states])
    return [float(ratio.kthvalue(max(1, int(share * len(ratio)))).values) for share in shares]


def final(run: dict[str, Any]) -> float:
    value = run["curve"][-1]["held_out"]
    return math.inf if run["error"] or not math.isfinite(value) else value


def summary(runs: list[dict[str, Any]], long: int) -> dict[str, Any]:
    """The best long run of each optimizer, and the steps and seconds at which it first is where AdamW's best ends."""
    table: dict[str, Any] = {}
    for run in best_runs(runs, long):
        table[run["setting"]["optimizer"]] = run["setting"] | {"held_out": final(run), "seconds": run["seconds"]}
        if "win_rates" in run:
            table[run["setting"]["optimizer"]]["win_rates"] = [min(run["win_rates"]), max(run["win_rates"])]
    for run in best_runs(runs, long) if "AdamW" in table else ():
        there = [p for p in run["curve"] if p["held_out"] <= table["AdamW"]["held_out"]]
        reached = {key: there[0][key] for key in ("step", "seconds")} if there else None
        table[run["setting"]["optimizer"]]["first at AdamW's final loss"] = reached
    return table


def best_runs(runs: list[dict[str, Any]], long: int) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for run in sorted(runs, key=final):
        if run["setting"]["steps"] == long and final(run) < math.inf:
            found.setdefault(run["setting"]["optimizer"], run)
    return list(found.values())


def plot(results: dict[str, Any], path: Path) -> None:
    what = results["configuration"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axis, key in zip(axes, ("step", "seconds"), strict=True):
        for run in best_runs(results["runs"], what["long"]):
            s, curve = run["setting"], [p for p in run["curve"] if p["step"] > 0]
            gamma = "" if s["gamma"] is None else f", gamma {s['gamma']:.2g}"
            label = f"{s['optimizer']}, lr {s['lr']:.2g}{gamma}"
            axis.plot([p[key] for p in curve], [p["held_out"] for p in curve], label=label, marker=".")
        axis.set(xlabel={"step": "steps"}.get(key, key), xscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out bits per byte")
    axes[0].legend(fontsize=8)
    size = f"{results['parameters'] / 1e6:.1f}M parameters, {what['context']} tokens a step"
    figure.suptitle(f"{size}, {results['environment']['device']}")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = "default: by device"
    whole: Callable[[str], int] = int
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sophia_gpt.json"), help="a PNG beside it")
    parser.add_argument("--commit", help="recorded in the results; default: git's HEAD")
    parser.add_argument("--data", help="file, folder or glob; default: the standard library's sources")
    parser.add_argument("--minutes", type=float, default=5.5, help="no run begins that they do not suffice for")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--context", type=whole, help=f"tokens of a step; {size}")
    parser.add_argument("--layers", type=whole, help=size)
    parser.add_argument("--width", type=whole, help=size)
    parser.add_argument("--heads", type=whole, help=size)
    parser.add_argument("--windows", type=whole, help=f"held-out sequences; {size}")
    parser.add_argument("--short", type=whole, help=f"steps of the runs that choose; {size}")
    parser.add_argument("--long", type=whole, help=f"steps of the runs that are compared; {size}")
    parser.add_argument("--evaluations", type=whole, default=10, help="of a run; default 10")
    parser.add_argument("--betas", type=float, nargs=2, default=[0.9, 0.95], help="Sophia's; default 0.9 0.95")
    parser.add_argument("--seed", type=whole, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    args = parser.parse_args(argv)
    for name, value in SIZES["smoke" if args.smoke else torch.device(args.device).type].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    # Sampled labels cost a gradient, a Hessian product several: it sees a quarter.
    args.curvature_tokens = {"SophiaG": args.context, "SophiaH": args.context // 4}
    return args


if __name__ == "__main__":
    Comparison(parse(None)).all()
