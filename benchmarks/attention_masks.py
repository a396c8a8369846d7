"""Times masks, grouped heads, dropout, bias and soft cap in sorder.attention, each against what it should cost.

    python benchmarks/attention_masks.py --out benchmarks/results/attention_masks.json

Second order is the gradient of the first backward with all cotangents defined; first order is forward and backward. A
``ratio`` is the measured time over the time that the work alone would take at the reference's speed: 1 is "costs what
it computes". References of masks are causal attention by row ranges, on the same kernels; plain causal and dense
attention have kernels of their own on some GPUs. Everything is bfloat16, medians in milliseconds from one process on
one GPU. A window of w is that of Mistral: a token sees itself and the w − 1 before it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import record
import torch
from attention import median_ms, peak_bytes

import sorder
from sorder import Mask

WIDTH = 64


class Passes:
    """First and second order of one call of sorder.attention."""

    def __init__(self, n: int, heads: int, key_heads: int | None = None, width: int = WIDTH, **options: Any) -> None:
        key_heads = key_heads or heads
        sizes = [(1, heads, n, width), (1, key_heads, n, width), (1, key_heads, n, width)]
        self.qkv, self.tangents = (
            [torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for size in sizes]
            for grad in (True, False)
        )
        self.do = torch.randn(sizes[0], device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.options = {"enable_gqa": key_heads != heads, **options}
        self.leaves = list(self.qkv)
        bias = options.get("attn_mask")
        if isinstance(bias, torch.Tensor) and bias.requires_grad:
            self.leaves.append(bias)
            self.tangents.append(torch.randn_like(bias))

    def first(self, create_graph: bool = False) -> tuple[torch.Tensor, ...]:
        q, k, v = self.qkv
        out = sorder.attention(q, k, v, **self.options)
        return torch.autograd.grad(out, self.leaves, self.do, create_graph=create_graph)

    def both(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.first(create_graph=True), [*self.leaves, self.do], self.tangents)

    def ms(self, rep: int) -> dict[str, float]:
        first = self.first(create_graph=True)
        second = lambda: torch.autograd.grad(first, [*self.leaves, self.do], self.tangents, retain_graph=True)  # noqa: E731
        return {"first_order": median_ms(self.first, rep), "second_backward": median_ms(second, rep)}


def _row(name: str, passes: Passes, rep: int, reference: dict[str, float] | None = None, work: float = 1.0) -> Any:
    ms = passes.ms(rep)
    row: dict[str, Any] = {"name": name, "ms": {k: round(v, 4) for k, v in ms.items()}}
    if reference is not None:
        row["work"] = round(work, 5)
        row["ratio"] = {k: round(v / (work * reference[k]), 3) for k, v in ms.items()}
    return row


def _causal_by_ranges(n: int) -> Mask:
    """A causal mask on the kernels that serve all masks, so that only the work differs from theirs."""
    return Mask(ranges=(torch.zeros(n, device="cuda", dtype=torch.int32), torch.arange(1, n + 1, device="cuda")))


def windows(rep: int) -> Iterator[dict[str, Any]]:
    """At 131,072 tokens, against full causal attention; work is the number of visible scores."""
    n, heads = 131_072, 8
    yield _row("causal 131072, fast path", Passes(n, heads, is_causal=True), rep)
    yield (full := _row("causal 131072", Passes(n, heads, mask=_causal_by_ranges(n)), rep))
    for window in (512, 4096):
        visible = window * n - window * (window - 1) / 2
        mask = Mask(causal=True, window=(window - 1, 0))
        yield _row(f"window {window}", Passes(n, heads, mask=mask), rep, full["ms"], visible / (n * (n + 1) / 2))


def grouped(rep: int) -> Iterator[dict[str, Any]]:
    """Against as many key heads as query heads, in time and in peak memory of a second-order step."""
    for heads, key_heads in ((32, 8), (8, 1)):
        whole = Passes(16_384, heads, is_causal=True)
        yield (reference := {**_row(f"{heads}/{heads} heads", whole, rep), "bytes": peak_bytes(whole.both)})
        del whole
        shared = Passes(16_384, heads, key_heads, is_causal=True)
        row = {**_row(f"{heads}/{key_heads} heads", shared, rep, reference["ms"]), "bytes": peak_bytes(shared.both)}
        yield {**row, "bytes_ratio": round(row["bytes"] / reference["bytes"], 3)}


def documents(rep: int) -> Iterator[dict[str, Any]]:
    """65,536 tokens, packed documents against one; work is the sum of the squares of their lengths."""
    n, heads = 65_536, 8
    yield (full := _row("one document 65536", Passes(n, heads, mask=_causal_by_ranges(n)), rep))
    for name, lengths in (
        ("16 documents of 4096", [4096] * 16),
        ("documents of 16 to 16384", [16_384, 8192, 16, 10_000, 48, 6384, 512, 8000, 3072, 5000, 128, 7800]),
    ):
        ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        work = sum(x * x for x in lengths) / n**2
        mask = Mask(causal=True, cu_seqlens=ends)
        yield _row(name, Passes(n, heads, mask=mask), rep, full["ms"], work)


def schedule(rep: int) -> Iterator[dict[str, Any]]:
    """At 16,384 tokens, the causal schedules against half of dense attention."""
    n, heads = 16_384, 8
    yield (dense := _row("dense 16384", Passes(n, heads), rep))
    yield _row("causal", Passes(n, heads, is_causal=True), rep, dense["ms"], 0.5)
    stop = torch.full((n,), n, device="cuda")
    everything = Mask(ranges=(torch.zeros_like(stop), stop))
    yield (dense := _row("dense by row ranges", Passes(n, heads, mask=everything), rep))
    yield _row("causal by row ranges", Passes(n, heads, mask=_causal_by_ranges(n)), rep, dense["ms"], 0.5)


def features(rep: int) -> Iterator[dict[str, Any]]:
    """At 8,192 tokens, what acts on each score, against plain causal attention by row ranges on the same kernels."""
    n, heads = 8192, 8
    ranges = _causal_by_ranges(n)
    bias = torch.randn(1, heads, n, n, device="cuda", dtype=torch.bfloat16)
    yield (plain := _row("plain 8192", Passes(n, heads, mask=ranges), rep))
    cases: dict[str, dict[str, Any]] = {
        "dropout": {"dropout_p": 0.1},
        "soft cap": {"softcap": 50.0},
        "alibi": {"mask": Mask(causal=True, alibi=2.0 ** -torch.arange(1.0, heads + 1, device="cuda"))},
        "bias": {"attn_mask": bias},
        "bias with gradient": {"attn_mask": bias.clone().requires_grad_()},
    }
    for name, options in cases.items():
        yield _row(name, Passes(n, heads, **{"mask": ranges, **options}), rep, plain["ms"])


SECTIONS: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    f.__name__: f for f in (schedule, grouped, windows, documents, features)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="parts to run")
    parser.add_argument("--minutes", type=float, default=10, help="start no further part after this many minutes")
    parser.add_argument("--rep", type=int, default=100, help="milliseconds of repetitions of each pass")
    parser.add_argument("--commit", help="commit to record where there is no git history")
    args = parser.parse_args()
    results: dict[str, Any] = {"environment": record.environment(torch.device("cuda"), args.commit)}
    start = time.monotonic()
    for name in args.only:
        if time.monotonic() - start > 60 * args.minutes:
            break
        results[name] = []
        for row in SECTIONS[name](args.rep):
            results[name].append(row)
            print(name, row, flush=True)
            record.write(args.out, results)
        results[f"{name}_seconds"] = round(time.monotonic() - start, 1)


if __name__ == "__main__":
    main()
