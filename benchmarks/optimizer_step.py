"""Cost of Sophia and AdaHessian against AdamW: the optimizer's step alone, and whole training steps at long context.

    python benchmarks/optimizer_step.py --out benchmarks/results/optimizer_step.json    # one H200, under a minute
    python benchmarks/optimizer_step.py --parts step kernels --out step.json            # the first two parts alone
    python benchmarks/optimizer_step.py --smoke --out smoke.json                        # any machine: does it run?

"step" is ``optimizer.step()`` between curvature updates, on the parameters of GPT-2 small (124M, float32) with random
gradients; AdamW is torch's, fused and foreach. Each time is that of a number of steps in a row, divided by it, and the
optimizers take turns; beside it how long one call keeps the host when the device is idle. "kernels" is the time on the
device of Sophia's two kernels, of other tilings too: what the settings in ``sorder/kernels/diagonal_step.py`` come
from. "training" is loss, gradient and step of a GPT of the same width and depth on one sequence in
bfloat16 autocast, a curvature update every 10 steps included: the mean over whole cycles.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sorder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import record
from gpt import GPT

from sorder.kernels import diagonal_step as kernels

TILINGS = {
    "search": [kernels.Tiling(b, w) for b, w in ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (16384, 8), (16384, 16))],
    "step": [kernels.Tiling(b, w) for b, w in ((512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8))],
}
PARTS = ("step", "kernels", "training")


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def parameters(layers: int, width: int, vocabulary: int, positions: int, device: torch.device) -> list[Tensor]:
    """GPT-2's: tied embedding, positions, and per block two norms, attention and MLP, with biases."""
    block = [(width,)] * 2 + [(3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,)] * 2 + [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    shapes = [(vocabulary, width), (positions, width), *block * layers, (width,), (width,)]
    return [torch.randn(s, device=device).mul_(0.02).requires_grad_() for s in shapes]


def sizes(args: argparse.Namespace) -> tuple[int, int, int, int]:
    return args.layers, args.width, args.vocabulary, args.positions


def steps(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Milliseconds of a step between updates, of all optimizers in turn."""
    makers: dict[str, Callable[[list[Tensor]], Any]] = {
        "AdamW(fused=True)": lambda p: torch.optim.AdamW(p, fused=True),
        "AdamW(foreach=True)": lambda p: torch.optim.AdamW(p, foreach=True),
        "SophiaH": lambda p: sorder.SophiaH(p, update_interval=10**9),
        "SophiaG": lambda p: sorder.SophiaG(p, update_interval=10**9),
        "AdaHessian": lambda p: sorder.AdaHessian(p, update_interval=10**9),
    }
    optimizers = {}
    for name, make in makers.items():
        params = parameters(*sizes(args), device)
        optimizer = optimizers[name] = make(params)
        for p in params:
            p.grad = torch.randn_like(p).mul_(1e-3)
        if not name.startswith("AdamW"):
            # A separable loss: the estimate costs nothing to speak of, and it is not what is timed.
            rows = (lambda p=params: (sum((t.square()).sum() for t in p), 1)) if name == "SophiaG" else None
            loss = lambda p=params: sum(t.square().sum() for t in p)  # noqa: E731
            optimizer.update_curvature(rows or loss)
        for _ in range(3):
            optimizer.step()
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(args.rounds):
        for name, optimizer in optimizers.items():
            began = now(device)
            for _ in range(args.repeats):
                optimizer.step()
            seconds[name].append((now(device) - began) / args.repeats)
    calls: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(args.rounds):
        for name, optimizer in optimizers.items():
            began = now(device)
            optimizer.step()
            calls[name].append(time.perf_counter() - began)
    base = seconds["AdamW(fused=True)"]
    count = sum(p.numel() for p in params)
    return [
        {
            "part": "step",
            "optimizer": name,
            "parameters": count,
            "tensors": len(params),
            "milliseconds": 1e3 * statistics.median(taken),
            "ratio_to_fused_adamw": statistics.median(t / b for t, b in zip(taken, base, strict=True)),
            "host_milliseconds": 1e3 * statistics.median(calls[name]),
        }
        for name, taken in seconds.items()
    ]


def tilings(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Milliseconds on the device, and bytes a second, of the search and the step, for each of :data:`TILINGS`."""
    p, g, m, h = ([torch.rand_like(t) for t in parameters(*sizes(args), device)] for _ in range(4))
    count, flag = sum(t.numel() for t in p), kernels.Flag(device)
    batch = kernels.Batch(p, m, h)
    rule: dict[str, Any] = {"lr": 1e-4, "keep": 1.0, "take": 0.1, "scale": 1.0, "eps": 1e-12}

    def step() -> None:
        batch.set_gradients(g)
        batch.step(flag, **rule)

    batch.set_gradients(g)
    for name, run, passes in (("search", lambda: batch.search(flag), 1), ("step", step, 6)):
        present = getattr(kernels, name.upper())
        for tiling in [present] if args.smoke else dict.fromkeys([present, *TILINGS[name]]):
            setattr(kernels, name.upper(), tiling)
            milliseconds = on_device(run, device, args.rounds)
            row = {"part": "kernels", "kernel": name, "block": tiling.block, "warps": tiling.warps}
            row |= {"set": tiling == present, "milliseconds": milliseconds}
            yield row | {"terabytes_per_second": passes * 4e-9 * count / milliseconds}
        setattr(kernels, name.upper(), present)
        batch.set_gradients(g)


def on_device(run: Callable[[], None], device: torch.device, rounds: int) -> float:
    """Median milliseconds between events around ``run`` on a GPU; by the clock elsewhere."""
    run()
    taken = []
    for _ in range(rounds):
        if device.type != "cuda":
            began = now(device)
            run()
            taken.append(1e3 * (now(device) - began))
            continue
        torch.cuda._sleep(1_000_000)  # cycles in which the host gets ahead, so that no launch is waited for
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        taken.append(first.elapsed_time(last))
    return statistics.median(taken)


def training(args: argparse.Namespace, device: torch.device, name: str, curvature_tokens: int) -> dict[str, Any]:
    """Seconds of a training step, and of those with an update and without, over whole cycles of ``interval`` steps."""
    torch.manual_seed(0)
    model = GPT(args.gpt_vocabulary, args.width, args.layers, args.heads).to(device)
    sequence = torch.randint(args.gpt_vocabulary, (1, args.tokens + 1), device=device)
    kinds: dict[str, Callable[[], Any]] = {
        "AdamW(fused=True)": lambda: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        "SophiaH": lambda: sorder.SophiaH(model.parameters(), lr=1e-4, update_interval=args.interval),
        "SophiaG": lambda: sorder.SophiaG(model.parameters(), lr=1e-4, update_interval=args.interval),
        "AdaHessian": lambda: sorder.AdaHessian(model.parameters(), lr=1e-4, update_interval=args.interval),
    }
    optimizer = kinds[name]()

    def logits(tokens: int) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(sequence[:, :tokens]).flatten(0, 1)

    def loss(tokens: int) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return F.cross_entropy(logits(tokens), sequence[0, 1 : tokens + 1])

    def curvature() -> Any:
        return sorder.gnb_loss(logits(curvature_tokens)) if name == "SophiaG" else loss(curvature_tokens)

    def step() -> bool:
        updates = name != "AdamW(fused=True)" and optimizer.curvature_due
        if updates:
            optimizer.update_curvature(curvature)
        optimizer.zero_grad()
        loss(args.tokens).backward()
        optimizer.step()
        return updates

    step()  # compiles, and is the first update
    for _ in range(args.interval - 1):
        step()
    taken: dict[bool, list[float]] = {True: [], False: []}
    cycle = args.interval * args.cycles
    began = now(device)
    for _ in range(cycle):
        first = now(device)
        taken[step()].append(now(device) - first)
    row: dict[str, Any] = {"part": "training", "optimizer": name, "tokens": args.tokens, "interval": args.interval}
    row |= {"curvature_tokens": curvature_tokens, "seconds": (now(device) - began) / cycle}
    row["seconds_between_updates"] = statistics.median(taken[False])
    if taken[True]:
        row["seconds_with_update"] = statistics.median(taken[True])
    return row


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON, written after every part")
    parser.add_argument("--commit", help="recorded in the results; default: git's HEAD")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50_257, help="of the parameters whose step is timed")
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--gpt-vocabulary", type=int, default=256, help="of the GPT that is trained")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--interval", type=int, default=10, help="steps from one curvature update to the next")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--repeats", type=int, default=20, help="steps of a round")
    parser.add_argument("--cycles", type=int, default=1, help="of updates, timed; one more comes before them")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    args = parser.parse_args(argv)
    if args.smoke:
        args.layers, args.width, args.heads, args.vocabulary, args.positions = 1, 16, 2, 64, 8
        args.gpt_vocabulary, args.tokens, args.interval, args.rounds, args.repeats = 64, 32, 2, 3, 2
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    device = torch.device(args.device)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    results = {"environment": record.environment(device, args.commit), "rows": rows}

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        record.write(args.out, results)
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()), flush=True)

    for row in steps(args, device) if "step" in args.parts else ():
        add(row)
    for row in tilings(args, device) if "kernels" in args.parts else ():
        add(row)
    if "training" not in args.parts:
        return
    # All tokens and a quarter of them, as the curvature of a part of the batch is the usual choice.
    runs = [("AdamW(fused=True)", 0), ("SophiaG", args.tokens), ("SophiaH", args.tokens // 4), ("SophiaH", args.tokens)]
    for name, curvature_tokens in [*runs, ("AdaHessian", args.tokens // 4)]:
        gc.collect()
        row = training(args, device, name, curvature_tokens)
        base = next((r for r in rows if r["part"] == "training"), row)
        add(row | {"ratio_to_fused_adamw": row["seconds"] / base["seconds"]})


if __name__ == "__main__":
    main()
