"""Trains a byte-level GPT on real text with Newton-CG, or with a rival.

    python examples/train_gpt.py          # the standard library's sources, Newton-CG, a few minutes on a CPU
    python examples/train_gpt.py --optimizer adamw
    python examples/train_gpt.py --data 'books/*.txt' --steps 200 --out runs/books
    python examples/train_gpt.py --resume --steps 400 --out runs/books
    tensorboard --logdir runs

It writes to --out: TensorBoard scalars, checkpoint.pt, loss.png, sample.txt. On a GPU the context is 32,768 tokens.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import corpus
import matplotlib
import optimizers
import torch
import torch.nn.functional as F
from gpt import GPT
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Sizes that a device trains in a few minutes.
PRESETS: dict[str, dict[str, int]] = {
    "cpu": {"context": 128, "batch": 16, "layers": 2, "width": 64, "heads": 2, "steps": 100, "windows": 32},
    "cuda": {"context": 32_768, "batch": 4, "layers": 6, "width": 384, "heads": 6, "steps": 60, "windows": 8},
}
WARMUP = 20  # steps over which the learning rate of a first-order optimizer rises
# What a resumed run cannot change.
FIXED = ["optimizer", "lr", "layers", "width", "heads", "context", "batch", "curvature_batch", "seed", "data"]


class UserError(Exception):
    """What is wrong with the request, in one line."""


def parse(argv: list[str] | None, defaults: dict[str, Any] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = "default: by device"
    parser.add_argument("--data", help="file, folder or glob; default: the standard library's sources")
    parser.add_argument(
        "--optimizer", default="newton-cg", type=str.lower, help="newton-cg, adamw, muon, or of torch-optimizer"
    )
    parser.add_argument("--lr", type=float, help="learning rate; default: the optimizer's")
    parser.add_argument("--steps", type=positive, help=size)
    parser.add_argument("--context", type=positive, help=f"tokens of a sequence; {size}")
    parser.add_argument("--batch", type=positive, help=f"sequences of a step; {size}")
    parser.add_argument("--curvature-batch", type=positive, help="of which Newton-CG's products see so many; a quarter")
    parser.add_argument("--layers", type=positive, help=size)
    parser.add_argument("--width", type=positive, help=size)
    parser.add_argument("--heads", type=positive, help=size)
    parser.add_argument("--checkpoint-blocks", action="store_true", help="recompute activations: slower, less memory")
    parser.add_argument(
        "--eval-every", type=positive, default=5, help="steps from one checkpoint to the next; default 5"
    )
    parser.add_argument("--windows", type=positive, help=f"held-out sequences to evaluate; {size}")
    parser.add_argument(
        "--sample", type=positive, default=300, help="bytes of text to generate at the end; default 300"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="default: runs/train_gpt/OPTIMIZER")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    if defaults:
        parser.set_defaults(**defaults)
    args = parser.parse_args(argv)
    for name, value in PRESETS["cuda" if args.device.startswith("cuda") else "cpu"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.curvature_batch is None:
        args.curvature_batch = max(1, args.batch // 4)
    args.out = args.out or Path("runs/train_gpt") / args.optimizer
    return args


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


class Run:
    """Model, optimizer, data and history: what a checkpoint holds, and what a step changes."""

    def __init__(self, args: argparse.Namespace, text: corpus.Corpus | None = None, **optimizer_options: Any) -> None:
        self.args = args
        try:
            self.device = torch.device(args.device)
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"device {args.device!r} cannot be used: {reason}") from error
        self.corpus = text or corpus.load(args.data, args.context)
        torch.manual_seed(args.seed)
        try:
            self.model = GPT(256, args.width, args.layers, args.heads, args.checkpoint_blocks).to(self.device)
            self.optimizer: Optimizer = optimizers.make(args.optimizer, self.model, args.lr, **optimizer_options)
        except ValueError as error:
            raise UserError(str(error)) from error
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.held_out = self.corpus.evaluation(args.windows, args.context)
        self.step = 0
        self.history: list[dict[str, float]] = []

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in nats; ``tokens`` is (batch, context + 1)."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(tokens[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def advance(self) -> float:
        """One optimizer step; the batch depends on the step's number alone, so a resumed run sees the same."""
        args = self.args
        tokens = self.corpus.batch(self.step, args.batch, args.context, args.seed).to(self.device)
        if args.optimizer != "newton-cg":
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * min(1.0, (self.step + 1) / WARMUP)
        few = tokens[: args.curvature_batch]
        value = optimizers.step(self.optimizer, lambda: self.loss(tokens), lambda: self.loss(few)).item()
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss is {value}")
        self.step += 1
        return value

    @torch.no_grad()
    def evaluate(self) -> float:
        """Bits per byte on the held-out windows."""
        losses = [self.loss(rows.to(self.device)) * len(rows) for rows in self.held_out.split(self.args.batch)]
        return (torch.stack(losses).sum() / len(self.held_out)).item() / math.log(2)

    @torch.no_grad()
    def generate(self, prompt: str, length: int, temperature: float = 0.8) -> str:
        generator = torch.Generator().manual_seed(self.args.seed)
        tokens = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(length):
            logits = self.model(tokens[:, -self.args.context :])[0, -1].float().cpu()
            choice = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)
            tokens = torch.cat([tokens, choice.to(self.device)[None]], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")

    def save(self) -> None:
        """The checkpoint is replaced as a whole or not at all."""
        on_gpu = self.device.type == "cuda"
        state = {
            "args": {k: str(v) if isinstance(v, Path) else v for k, v in vars(self.args).items()},
            "corpus": self.corpus.fingerprint,
            "step": self.step,
            "history": self.history,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self.device) if on_gpu else None,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        path = self.args.out / "checkpoint.pt"
        temporary = path.with_suffix(".tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(buffer.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def restore(self, state: dict[str, Any]) -> None:
        if state["corpus"] != self.corpus.fingerprint:
            raise UserError("the training text is not the one that the checkpoint was trained on")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.history = state["step"], state["history"]
        torch.set_rng_state(state["random"])
        if state["cuda_random"] is not None:
            torch.cuda.set_rng_state(state["cuda_random"], self.device)


def load_checkpoint(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"nothing to resume: {path} does not exist") from None
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} is not a readable checkpoint: {reason}") from error


def scalars(run: Run, loss: float, seconds: float) -> dict[str, float]:
    values = {
        "loss": loss,
        "tokens per second": run.args.batch * run.args.context / seconds,
        "peak memory (GB)": peak_memory(run.device) / 1e9,
    }
    last = getattr(run.optimizer, "last_step", None)
    if last is not None:
        values |= {
            "newton-cg/CG iterations": last.cg_iterations,
            "newton-cg/products": last.products,
            "newton-cg/damping": last.damping,
            "newton-cg/reduction ratio": last.reduction_ratio,
            "newton-cg/curvature along the step": last.curvature_along_step,
            "newton-cg/step length": last.step_length,
        }
    return values


def peak_memory(device: torch.device) -> float:
    """Bytes: of the GPU's allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def plot(history: list[dict[str, float]], title: str, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.plot(
        [h["step"] for h in history], [h["loss"] / math.log(2) for h in history], label="training batch", alpha=0.6
    )
    evaluated = [h for h in history if "held_out" in h]
    axes.plot([h["step"] for h in evaluated], [h["held_out"] for h in evaluated], "o-", label="held-out files")
    axes.set(xlabel="step", ylabel="bits per byte", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def train(args: argparse.Namespace, state: dict[str, Any] | None = None) -> Run:
    run = Run(args)
    if state is not None:
        run.restore(state)
    args.out.mkdir(parents=True, exist_ok=True)
    count = sum(p.numel() for p in run.model.parameters())
    print(
        f"{count / 1e6:.2f}M parameters, {args.batch} × {args.context} bytes a step, "
        f"{len(run.corpus.train) / 1e6:.1f} MB of text, {args.optimizer} on {run.device}"
    )
    writer = SummaryWriter(str(args.out / "tensorboard"), purge_step=run.step or None)
    with closing(writer), tqdm(total=args.steps, initial=run.step, unit="step") as bar:
        if run.step == 0:
            writer.add_scalar("held-out bits per byte", run.evaluate(), 0)
        while run.step < args.steps:
            began = time.perf_counter()
            loss = run.advance()
            values = scalars(run, loss, time.perf_counter() - began)
            record: dict[str, float] = {"step": run.step, "loss": loss}
            run.history.append(record)
            if run.step % args.eval_every == 0 or run.step == args.steps:
                record["held_out"] = values["held-out bits per byte"] = run.evaluate()
                run.save()
            for name, value in values.items():
                writer.add_scalar(name, value, run.step)
            shown = next((h["held_out"] for h in reversed(run.history) if "held_out" in h), math.nan)
            bar.set_postfix_str(f"loss {loss:.3f}, held-out {shown:.3f} bits/byte")
            bar.update()
        text = run.generate("import ", args.sample)
        writer.add_text("sample", text, run.step)
    (args.out / "sample.txt").write_bytes(text.encode())
    plot(run.history, f"{args.optimizer}, {count / 1e6:.1f}M parameters", args.out / "loss.png")
    print(f"\n{text}\n\nwrote checkpoint.pt, loss.png, sample.txt and tensorboard/ to {args.out}")
    return run


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    checkpoint = args.out / "checkpoint.pt"
    kept = f"; the last good checkpoint is {checkpoint}"
    try:
        state = None
        if args.resume:
            state = load_checkpoint(checkpoint)
            saved = {k: v for k, v in state["args"].items() if k not in ("out", "resume", "device")}
            args = parse(argv, saved)
            changed = [name for name in FIXED if getattr(args, name) != saved[name]]
            if changed:
                raise UserError(f"a resumed run cannot change {changed[0]}, {saved[changed[0]]} in {checkpoint}")
        train(args, state)
    except (UserError, corpus.CorpusError) as error:
        return fail(str(error))
    except FloatingPointError as error:
        return fail(f"training stopped: {error}{kept if checkpoint.exists() else ''}")
    except torch.cuda.OutOfMemoryError:
        return fail("out of GPU memory: try --checkpoint-blocks, or a smaller --context or --batch")
    except OSError as error:
        return fail(f"cannot write to {args.out}: {error.strerror or error}{kept if checkpoint.exists() else ''}")
    except KeyboardInterrupt:
        return fail(f"interrupted{kept + '; go on with --resume' if checkpoint.exists() else ''}", code=130)
    return 0


def fail(message: str, code: int = 2) -> int:
    print(f"train_gpt.py: error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
