"""Time and memory of exact curvature products of a GPT, against its gradient with PyTorch's own attention.

    python benchmarks/gpt_hvp.py --out benchmarks/results/gpt_hvp.json      # one H200, about three minutes
    python benchmarks/gpt_hvp.py --smoke --out smoke.json                   # any machine, only to see that it runs

GPT-2-small's shape, one sequence, bfloat16 autocast, float32 weights. "functional" is one product of ``sorder.func``,
all included. "live" is ``sorder.curvature.CurvaturePoint``, what the optimizers run: the point (loss and gradient, and
in reverse-over-reverse a graph that is kept) and then any number of products.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sorder
from sorder.curvature import CurvaturePoint
from sorder.func import ggnvp, hvp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import record
from gpt import GPT

Vector = dict[str, Tensor]
FORWARD, REVERSE = "forward-over-reverse", "reverse-over-reverse"


class Problem:
    """A GPT, a sequence of random tokens, and a random direction (like the parameters), made at need."""

    def __init__(
        self, tokens: int, heads: int, vocabulary: int, args: argparse.Namespace, checkpoint: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.device = torch.device(args.device)
        self.model = GPT(vocabulary, args.width, args.layers, heads, checkpoint_blocks=checkpoint).to(self.device)
        self.sequence = torch.randint(vocabulary, (1, tokens + 1), device=self.device)
        self.params = dict(self.model.named_parameters())
        self.values = {name: p.detach() for name, p in self.params.items()}

    @functools.cached_property
    def direction(self) -> Vector:
        return {name: torch.randn_like(p) for name, p in self.values.items()}

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16)

    def outputs(self, params: Vector | None = None) -> Tensor:
        inputs = self.sequence[:, :-1]
        with self.autocast():
            logits = self.model(inputs) if params is None else torch.func.functional_call(self.model, params, inputs)
        return logits.flatten(0, 1)

    def loss_of(self, outputs: Tensor) -> Tensor:
        with self.autocast():
            return F.cross_entropy(outputs, self.sequence[0, 1:])

    def gradient(self) -> list[Tensor]:
        """With PyTorch's attention, as a first-order optimizer takes it."""
        return list(torch.autograd.grad(self.loss_of(self.outputs()), list(self.params.values())))

    def hessian(self, mode: Any) -> list[Tensor]:
        def loss(params: Vector) -> Tensor:
            return self.loss_of(self.outputs(params))

        with sorder.exact_attention():
            return list(hvp(loss, (self.values,), (self.direction,), mode=mode)[0].values())

    def ggn(self) -> list[Tensor]:
        with sorder.exact_attention():
            product = ggnvp(self.outputs, self.loss_of, (self.values,), (self.direction,))
            return list(product[0].values())

    def live(self, kind: str, mode: str) -> CurvaturePoint:
        closure = lambda: self.loss_of(self.outputs())  # noqa: E731
        return CurvaturePoint(closure, list(self.params.values()), kind, mode=mode)


class Meter:
    """Seconds, and peak of allocated memory, of a call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, call: Callable[[], Any], repeats: int, warm: bool = True) -> tuple[dict[str, float], Any]:
        seconds, result = [], None
        if warm:
            call()
        self._reset()
        for _ in range(repeats):
            del result
            began = self._now()
            result = call()
            seconds.append(self._now() - began)
        measured = {"seconds": statistics.median(seconds)}
        if self.device.type == "cuda":
            measured["peak_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
        return measured, result

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _reset(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


class Bench:
    """Runs parts, adds ratios to the gradient of the same problem, and writes after each."""

    def __init__(self, args: argparse.Namespace, results: dict[str, Any]) -> None:
        self.args, self.results = args, results
        self.meter = Meter(torch.device(args.device))

    def add(self, problem: dict[str, Any], name: str, measure: Callable[[], dict[str, Any]]) -> None:
        row: dict[str, Any] = {**problem, "part": name}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                row |= measure()
            except Exception as error:  # one part's failure, out of memory included, must not cost the others
                row["error"] = f"{type(error).__name__}: {error}"[:300]
        fallbacks = {str(w.message) for w in said if "sorder" in w.filename or "instead" in str(w.message)}
        if fallbacks:  # the row then measures another way than its name says
            row["warnings"] = sorted(fallbacks)
        rows: list[dict[str, Any]] = self.results["rows"]
        base = next((r for r in rows if r["part"] == "gradient" and all(r[k] == problem[k] for k in problem)), None)
        for key, ratio in (("seconds", "time_ratio"), ("peak_gb", "memory_ratio")):
            if base is not None and key in row and key in base:
                row[ratio] = row[key] / base[key]
        rows.append(row)
        record.write(self.args.out, self.results)
        print(line(row), flush=True)

    def products(self, tokens: int, heads: int, vocabulary: int) -> None:
        args = self.args
        shape = {"tokens": tokens, "heads": heads, "vocabulary": vocabulary, "checkpoint": False}
        problem = Problem(tokens, heads, vocabulary, args)
        print(f"\n{tokens} tokens, {heads} heads, vocabulary {vocabulary}\n{HEADER}", flush=True)
        self.add(shape, "gradient", lambda: self.meter(problem.gradient, args.repeats)[0])
        references: dict[str, list[Tensor]] = {}

        def functional(kind: str, call: Callable[[], list[Tensor]]) -> dict[str, Any]:
            row, product = self.meter(call, args.repeats)
            return row | difference(references, kind, product)

        for mode in (FORWARD, REVERSE):
            call = functools.partial(problem.hessian, mode)
            self.add(shape, f"hessian, functional, {mode}", functools.partial(functional, "hessian", call))
        self.add(shape, "ggn, functional", lambda: functional("ggn", problem.ggn))
        for kind in ("hessian", "ggn"):
            for mode in (REVERSE, FORWARD):
                live = functools.partial(self.live, problem, kind, mode, references)
                self.add(shape, f"{kind}, live, {mode}", live)

    def live(self, problem: Problem, kind: str, mode: str, references: dict[str, list[Tensor]]) -> dict[str, Any]:
        """A product at a point that is there; the peak includes the point."""
        vector = list(problem.direction.values())
        with sorder.exact_attention():
            making, point = self.meter(lambda: problem.live(kind, mode), 1)
            with point:
                row, product = self.meter(lambda: point.product(vector), self.args.repeats)
        row["point_seconds"] = making["seconds"]
        if "peak_gb" in row:
            row["peak_gb"] = max(row["peak_gb"], making["peak_gb"])
        return row | difference(references, kind, product)

    def long(self, tokens: int, heads: int) -> None:
        """One exact Hessian product with recomputation of every block."""
        args = self.args
        print(f"\n{tokens} tokens, {heads} heads, vocabulary 256, checkpoint\n{HEADER}", flush=True)
        Problem(min(tokens, 2048), heads, 256, args, checkpoint=True).hessian(FORWARD)  # compiles the kernels
        problem = Problem(tokens, heads, 256, args, checkpoint=True)
        shape = {"tokens": tokens, "heads": heads, "vocabulary": 256, "checkpoint": True}
        self.add(shape, "gradient", lambda: self.meter(problem.gradient, 1, warm=False)[0])

        def measure() -> dict[str, Any]:
            row, product = self.meter(lambda: problem.hessian(FORWARD), 1, warm=False)
            return row | difference({}, "hessian", product)

        self.add(shape, f"hessian, functional, {FORWARD}", measure)


def difference(references: dict[str, list[Tensor]], kind: str, product: list[Tensor]) -> dict[str, float]:
    """Norm, and relative distance from the first product of this kind: two ways in bfloat16 agree to its rounding."""
    product = [t.cpu() for t in product]  # the GPU's memory is being measured
    reference = references.setdefault(kind, product)
    return {
        "product_norm": norm(product),
        "relative_difference": norm([a - b for a, b in zip(product, reference, strict=True)]) / norm(reference),
    }


def norm(tensors: list[Tensor]) -> float:
    return torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt().item()


HEADER = f"{'part':<46} {'seconds':>9} {'× grad':>7} {'GB':>7} {'× grad':>7} {'point s':>8} {'rel. diff.':>10}"


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['part']:<46} {row['error']}"
    said = "".join(f"\n  {text}" for text in row.get("warnings", ()))

    def show(key: str, form: str) -> str:
        return format(row[key], form) if key in row else "".rjust(int(form.partition(".")[0]))

    return (
        f"{row['part']:<46} {show('seconds', '9.4f')} {show('time_ratio', '7.2f')} {show('peak_gb', '7.2f')} "
        f"{show('memory_ratio', '7.2f')} {show('point_seconds', '8.3f')} {show('relative_difference', '10.1e')}{said}"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON, written after every part")
    parser.add_argument("--commit", help="recorded in the results; default: git's HEAD")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabularies", type=int, nargs="*", default=[256, 50_304])
    parser.add_argument("--long-tokens", type=int, default=262_144, help="of the product with checkpoint; 0: none")
    parser.add_argument("--long-heads", type=int, default=6)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    args = parser.parse_args(argv)
    if args.smoke:
        args.tokens, args.heads, args.vocabularies, args.layers, args.width = 32, 2, [64], 1, 16
        args.long_tokens, args.long_heads, args.repeats = 64, 2, 1
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    shape = {"layers": args.layers, "width": args.width, "dtype": "bfloat16 autocast", "batch": 1}
    results = {"environment": record.environment(torch.device(args.device), args.commit), "model": shape, "rows": []}
    bench = Bench(args, results)
    for vocabulary in args.vocabularies:
        bench.products(args.tokens, args.heads, vocabulary)
    if args.long_tokens:
        bench.long(args.long_tokens, args.long_heads)


if __name__ == "__main__":
    main()
