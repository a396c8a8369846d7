"""Times sorder.attention against PyTorch's fused and materialised attention, and published rivals where installed.

    python benchmarks/attention.py --out benchmarks/results/attention.json

Every figure of a row comes from one process on one GPU, medians in milliseconds. Passes: ``forward``, ``backward``
(first order, through autograd), ``second_backward`` (the gradient of the first backward, all three cotangents
defined), ``jvp_grad`` (value of the gradient and its tangent by ``torch.func.jvp`` of ``torch.func.vjp``, everything
included; ``jvp_grad_captured``, up to 8,192 tokens: in a CUDA graph, without the host's time between its kernels).
Memory is the peak above the inputs of a whole second-order step and of one ``jvp_grad``.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch
import torch.nn.functional as F
import triton
from torch.func import jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

import sorder

Attention = Callable[..., torch.Tensor]
CAPTURED_LENGTH = 8192  # up to which the host's time between kernels may be the longer
MATERIALISED_LIMIT = 40e9  # bytes of scores that materialised attention may hold, of about seven such matrices


def sdpa(backend: SDPBackend | None) -> Attention:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return attention


def rivals() -> dict[str, Attention]:
    """Published operators with a second backward, if they can be imported here."""
    found: dict[str, Attention] = {}
    try:
        from bob import sdpa_bob
        from bob.kernels import common

        common.AUTOTUNE_LENGTH_CEILING = 4096  # longer problems take its choice at 4096: tuning one takes half an hour
        found["flashbob"] = lambda q, k, v, is_causal: sdpa_bob(q, k, v, is_causal=is_causal)
    except ImportError:
        pass
    return found


FIRST_ORDER: dict[str, Attention] = {
    "sorder": sorder.attention,
    "sdpa": sdpa(None),
    "flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
}
SECOND_ORDER: dict[str, Attention] = {"sorder": sorder.attention, "materialised": sdpa(SDPBackend.MATH), **rivals()}


def median_ms(run: Callable[[], Any], rep: int) -> float:
    """Median of the calls that fit in ``rep`` milliseconds, and of at least one, after one that compiles."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        begin.record()
        run()
        end.record()
        end.synchronize()
    once = begin.elapsed_time(end)
    if once > rep:
        return once
    return triton.testing.do_bench(run, warmup=rep // 4, rep=rep, return_mode="median")


def captured(run: Callable[[], Any]) -> Callable[[], None]:
    """``run``, once compiled, as the replay of a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def peak_bytes(run: Callable[[], Any]) -> int:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


class Problem:
    """Inputs of one row of the table and the four passes over them."""

    def __init__(self, heads: int, n: int, d: int, causal: bool, dtype: torch.dtype) -> None:
        self.causal = causal
        self.tensors = [torch.randn(1, heads, n, d, device="cuda", dtype=dtype) for _ in range(7)]

    def passes(self, attention: Attention, second_order: bool) -> dict[str, Callable[[], Any]]:
        *primals, tq, tk, tv = self.tensors
        q, k, v, do = (x.clone().requires_grad_() for x in primals)
        tangents = (tq, tk, tv)

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return attention(q, k, v, is_causal=self.causal)

        if not second_order:
            out = attention(q, k, v, is_causal=self.causal)
            return {
                "forward": forward,
                "backward": lambda: torch.autograd.grad(out, (q, k, v), primals[3], retain_graph=True),
            }
        first = torch.autograd.grad(attention(q, k, v, is_causal=self.causal), (q, k, v), do, create_graph=True)

        def gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return vjp(lambda *x: attention(*x, is_causal=self.causal), q, k, v)[1](primals[3])

        def whole_step() -> Any:
            a = torch.autograd.grad(attention(q, k, v, is_causal=self.causal), (q, k, v), do, create_graph=True)
            return torch.autograd.grad(a, (q, k, v, do), tangents)

        passes = {
            "second_backward": lambda: torch.autograd.grad(first, (q, k, v, do), tangents, retain_graph=True),
            "second_order_step": whole_step,
        }
        if attention is sorder.attention:
            passes["jvp_grad"] = lambda: jvp(gradient, tuple(primals[:3]), tangents)
        return passes


def row(heads: int, n: int, d: int, causal: bool, dtype: torch.dtype, rep: int) -> dict[str, Any]:
    """All passes of all operators that can run the problem."""
    result: dict[str, Any] = {"heads": heads, "n": n, "d": d, "causal": causal, "dtype": str(dtype), "ms": {}}
    problem = Problem(heads, n, d, causal, dtype)
    for order, table in (("first", FIRST_ORDER), ("second", SECOND_ORDER)):
        for name, attention in table.items():
            if name == "materialised" and heads * n * n * 2 * 7 > MATERIALISED_LIMIT:
                continue
            if name == "flashbob" and (not causal or d not in (64, 128) or dtype != torch.bfloat16):
                continue  # tuning it takes minutes for each kind of problem
            try:
                passes = problem.passes(attention, order == "second")
                for label, run in passes.items():
                    result["ms"][f"{name}.{label}"] = round(median_ms(run, rep), 4)
                    if label == "jvp_grad" and n <= CAPTURED_LENGTH:
                        result["ms"][f"{name}.{label}_captured"] = round(median_ms(captured(run), rep), 4)
                if order == "second" and name != "materialised":
                    bytes_ = peak_bytes(passes["second_order_step"])
                    result[f"{name}.bytes_per_token_and_head"] = round(bytes_ / (n * heads), 1)
                if "jvp_grad" in passes:
                    bytes_ = peak_bytes(passes["jvp_grad"])
                    result[f"{name}.jvp_grad_bytes_per_token_and_head"] = round(bytes_ / (n * heads), 1)
            except (RuntimeError, TypeError, ValueError, torch.OutOfMemoryError) as error:
                result[f"{name}.error"] = str(error).split("\n")[0][:200]
            passes = {}
            gc.collect()
            torch.cuda.empty_cache()
    return result


def ratios(ms: dict[str, float]) -> dict[str, float]:
    """The figures that the README quotes."""

    def ratio(a: str, b: str) -> float | None:
        return round(ms[a] / ms[b], 3) if a in ms and b in ms else None

    first = {
        f"second_backward / {name} backward": ratio("sorder.second_backward", f"{name}.backward")
        for name in ("flash", "cudnn")
    }
    own = {f"{p} / sdpa {p}": ratio(f"sorder.{p}", f"sdpa.{p}") for p in ("forward", "backward")}
    others = {
        f"{name} second_backward / ours": ratio(f"{name}.second_backward", "sorder.second_backward")
        for name in SECOND_ORDER
        if name != "sorder"
    }
    if {"cudnn.forward", "cudnn.backward"} <= ms.keys():
        for label in ("jvp_grad", "jvp_grad_captured"):
            if f"sorder.{label}" in ms:
                gradient = ms["cudnn.forward"] + ms["cudnn.backward"]
                others[f"{label} / cudnn gradient"] = round(ms[f"sorder.{label}"] / gradient, 3)
    return {k: v for k, v in {**first, **own, **others}.items() if v is not None}


def problems() -> list[tuple[int, int, int, bool, torch.dtype]]:
    """(heads, length, width, causal, dtype), in the order of importance: a budget cuts the end."""
    bf16 = torch.bfloat16
    table = [(8, n, d, True, bf16) for n in (8192, 32768) for d in (64, 128)]
    table += [(8, n, d, True, bf16) for n in (4096, 16384) for d in (64, 128)]
    table += [(1, 1_048_576, 64, True, bf16)]
    table += [(32, 8192, 64, True, bf16), (8, 65_536, 64, True, bf16)]
    table += [(8, 1024, d, True, bf16) for d in (64, 128)]
    table += [(8, 8192, d, False, bf16) for d in (64, 128)]
    table += [(8, 8192, 64, True, torch.float32), (8, 8192, 32, True, bf16), (1, 262_144, 128, True, bf16)]
    table += [(8, 65_536, 128, True, bf16), *((8, 2048, d, True, bf16) for d in (64, 128))]
    table += [(8, 32768, 32, True, bf16), (8, 8192, 32, False, bf16), (8, 131_072, 64, True, bf16)]
    return table


def plot(results: dict[str, Any], path: Path) -> None:
    """Time against length, causal bfloat16: first backward of PyTorch's fused kernels, second backward of ours, of
    FlashBoB's and of materialised attention.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    lines = {
        "sorder.second_backward": "second backward, sorder",
        "cudnn.backward": "first backward, cuDNN",
        "flash.backward": "first backward, flash",
        "flashbob.second_backward": "second backward, FlashBoB",
        "materialised.second_backward": "second backward, materialised",
    }
    for axis, d in zip(axes, (64, 128), strict=True):
        rows = sorted(
            (
                r
                for r in results["rows"]
                if r["d"] == d and r["causal"] and r["heads"] == 8 and "bfloat16" in r["dtype"]
            ),
            key=lambda r: r["n"],
        )
        for key, label in lines.items():
            points = [(r["n"], r["ms"][key]) for r in rows if key in r["ms"]]
            if points:
                axis.loglog(*zip(*points, strict=True), "o-", base=2, label=label)
        axis.set(title=f"8 heads of width {d}, causal, bfloat16", xlabel="sequence length")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("milliseconds")
    axes[1].legend(loc="lower right", fontsize="small")
    figure.suptitle(f"{results['environment']['device']}, torch {results['environment']['torch']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write; the plot goes beside it as .png")
    parser.add_argument("--minutes", type=float, default=60, help="start no further row after this many minutes")
    parser.add_argument("--rep", type=int, default=100, help="milliseconds of repetitions of each pass")
    parser.add_argument("--commit", help="commit to record where there is no git history")
    parser.add_argument("--heads", type=int, help="run one problem only: causal, bfloat16, with --length and --width")
    parser.add_argument("--length", type=int, default=1_048_576)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    results: dict[str, Any] = {"environment": record.environment(torch.device("cuda"), args.commit), "rows": []}
    start = time.monotonic()
    one = [(args.heads, args.length, args.width, True, torch.bfloat16)]
    for heads, n, d, causal, dtype in problems() if args.heads is None else one:
        if time.monotonic() - start > 60 * args.minutes:
            break
        entry = row(heads, n, d, causal, dtype, args.rep)
        entry["ratios"] = ratios(entry["ms"])
        results["rows"].append(entry)
        print(heads, n, d, "causal" if causal else "dense", entry["dtype"], entry["ms"], entry["ratios"], flush=True)
        record.write(args.out, results)
    plot(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
