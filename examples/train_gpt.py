"""Trains a byte-level GPT on real text with Newton-CG, or with a rival.

    python examples/train_gpt.py          # the standard library's sources, Newton-CG, a few minutes on a CPU
    python examples/train_gpt.py --preconditioner kfac                 # Kronecker factors before the exact products
    python examples/train_gpt.py --optimizer kfac                      # or sophia-g, adamw, muon, …
    python examples/train_gpt.py --data 'books/*.txt' --steps 200 --out runs/books
    python examples/train_gpt.py --resume --steps 400 --out runs/books
    tensorboard --logdir runs

It writes to a folder: TensorBoard scalars, checkpoint.pt, loss.png, sample.txt. Without --out every run gets a new one,
runs/train_gpt/OPTIMIZER, OPTIMIZER-2, …, and --resume continues the last of them. A folder that is named by --out and
holds a run already is refused, unless with --resume or --overwrite. On a GPU the context is 32,768 tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corpus
import loss_curve
import optimizers
import run_folder
import torch
import torch.nn.functional as F
from gpt import GPT
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import sorder

# Sizes that a device trains in a few minutes.
PRESETS: dict[str, dict[str, int]] = {
    "cpu": {"context": 128, "batch": 16, "layers": 2, "width": 64, "heads": 2, "steps": 100, "windows": 32},
    "cuda": {"context": 32_768, "batch": 4, "layers": 6, "width": 384, "heads": 6, "steps": 60, "windows": 8},
}
WARMUP = 20  # steps over which the learning rate rises, where steps have no length of their own
# What a resumed run cannot change; the text has a fingerprint.
FIXED = ["optimizer", "preconditioner", "lr", "layers", "width", "heads", "context", "batch", "curvature_batch", "seed"]
RUNS = Path("runs/train_gpt")


class UserError(Exception):
    """What is wrong with the request, in one line."""


def parse(argv: list[str] | None, defaults: dict[str, Any] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size, positive = "default: by device", whole(1)
    parser.add_argument("--data", help="file, folder or glob; default: the standard library's sources")
    parser.add_argument(
        "--optimizer",
        default="newton-cg",
        type=str.lower,
        help=f"{', '.join(optimizers.LEARNING_RATES)}, or a class of torch-optimizer but Lookahead; default newton-cg",
    )
    parser.add_argument(
        "--preconditioner", choices=optimizers.PRECONDITIONERS, default="none", help="of newton-cg's CG; default none"
    )
    parser.add_argument("--lr", type=float, help="learning rate; default: the optimizer's")
    parser.add_argument("--steps", type=positive, help=size)
    parser.add_argument("--context", type=positive, help=f"tokens of a sequence; {size}")
    parser.add_argument("--batch", type=positive, help=f"sequences of a step; {size}")
    parser.add_argument("--curvature-batch", type=positive, help="of which curvature sees so many; default: a quarter")
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
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=positive, default=1, help="of the CPU; the default model gains by no more")
    parser.add_argument("--out", type=Path, help=f"folder to write to; default: a new one, {RUNS}/OPTIMIZER-NUMBER")
    used = parser.add_mutually_exclusive_group()
    used.add_argument("--resume", action="store_true", help="continue the run in --out; default: the optimizer's last")
    used.add_argument("--overwrite", action="store_true", help="start afresh: removes the run in --out")
    if defaults:
        parser.set_defaults(**defaults)
    args = parser.parse_args(argv)
    if args.overwrite and args.out is None:
        parser.error("--overwrite needs --out; without it every run gets a new folder")
    for name, value in PRESETS["cuda" if args.device.startswith("cuda") else "cpu"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.curvature_batch is None:
        args.curvature_batch = max(1, args.batch // 4)
    return args


def whole(low: int, high: int = 2**32 - 1) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, got {text!r}")
        return int(text)

    return read


class Run:
    """Model, optimizer, data and history: what a checkpoint holds, and what a step changes."""

    def __init__(self, args: argparse.Namespace, text: corpus.Corpus | None = None, **optimizer_options: Any) -> None:
        self.args = args
        try:
            self.device = torch.device(args.device)
            torch.zeros(1, device=self.device).item()
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"device {args.device!r} cannot be used: {reason}") from error
        self.corpus = text or corpus.load(args.data, args.context)
        torch.manual_seed(args.seed)
        try:
            self.model = GPT(256, args.width, args.layers, args.heads, args.checkpoint_blocks).to(self.device)
            if args.preconditioner != "none":
                if args.optimizer != "newton-cg":
                    raise ValueError(f"--preconditioner is for newton-cg, and {args.optimizer} has none")
                optimizer_options = {"preconditioner": args.preconditioner, **optimizer_options}
            self.optimizer: Optimizer = optimizers.make(args.optimizer, self.model, args.lr, **optimizer_options)
        except ValueError as error:
            raise UserError(str(error)) from error
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.held_out = self.corpus.evaluation(args.windows, args.context)
        self.step = 0
        self.history: list[dict[str, float]] = []

    def loss(self, tokens: Tensor, sample_labels: bool = False) -> Any:
        """Mean cross-entropy of the next byte, in nats; ``tokens`` is (batch, context + 1).

        With ``sample_labels``, what SophiaG takes its curvature from: sum and count for bytes that the model draws.
        """
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(tokens[:, :-1])
            if sample_labels:
                return sorder.gnb_loss(logits)
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def advance(self) -> float:
        """One optimizer step; the batch depends on the step's number alone, so a resumed run sees the same."""
        args = self.args
        tokens = self.corpus.batch(self.step, args.batch, args.context, args.seed).to(self.device)
        if args.optimizer not in optimizers.OWN_LENGTH:
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                if rate is not None:  # some of torch-optimizer choose it themselves
                    group["lr"] = rate * min(1.0, (self.step + 1) / WARMUP)
        few, sampled = tokens[: args.curvature_batch], isinstance(self.optimizer, sorder.SophiaG)
        value = optimizers.step(self.optimizer, lambda: self.loss(tokens), lambda: self.loss(few, sampled)).item()
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
        run_folder.save(self.args.out, state)

    def restore(self, state: dict[str, Any]) -> None:
        if state["corpus"] != self.corpus.fingerprint:
            source = self.args.data or "the standard library"
            raise UserError(f"the text of {source} is not the one that the checkpoint was trained on")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.history = state["step"], state["history"]
        torch.set_rng_state(state["random"])
        if state["cuda_random"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_random"], self.device)


def scalars(run: Run, loss: float, seconds: float) -> dict[str, float]:
    return {
        "loss": loss,
        "tokens per second": run.args.batch * run.args.context / seconds,
        "peak memory (GB)": peak_memory(run.device) / 1e9,
        **optimizers.scalars(run.optimizer),
    }


def peak_memory(device: torch.device) -> float:
    """Bytes: of the GPU's allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def train(args: argparse.Namespace, state: dict[str, Any] | None = None) -> Run:
    torch.set_num_threads(args.threads)
    run = Run(args)
    if state is not None:
        run.restore(state)
    if args.overwrite:
        run_folder.clear(args.out)
    if state is None:
        run.save()  # so that a full disk shows before the first step, and every run can be resumed
    count = sum(p.numel() for p in run.model.parameters())
    print(
        f"{count / 1e6:.2f}M parameters, {args.batch} × {args.context} bytes a step, "
        f"{len(run.corpus.train) / 1e6:.1f} MB of text, {args.optimizer} on {run.device}, to {args.out}"
    )
    began_at, held_out = run.step, run.evaluate()
    writer = SummaryWriter(str(args.out / "tensorboard"), purge_step=run.step + 1 if state else None)
    with contextlib.closing(writer), tqdm(total=args.steps, initial=run.step, unit="step") as bar:
        if state is None:
            writer.add_scalar("held-out bits per byte", held_out, 0)
        while run.step < args.steps:
            began = time.perf_counter()
            loss = run.advance()
            values = scalars(run, loss, time.perf_counter() - began)
            record: dict[str, float] = {"step": run.step, "loss": loss}
            run.history.append(record)
            if run.step % args.eval_every == 0 or run.step == args.steps:
                record["held_out"] = values["held-out bits per byte"] = held_out = run.evaluate()
                run.save()
            for name, value in values.items():
                writer.add_scalar(name, value, run.step)
            bar.set_postfix_str(f"loss {loss / math.log(2):.3f}, held-out {held_out:.3f} bits/byte")
            bar.update()
        text = run.generate("import ", args.sample)
        writer.add_text("sample", text, run.step)
    (args.out / "sample.txt").write_bytes(text.encode())
    loss_curve.plot(run.history, f"{args.optimizer}, {count / 1e6:.1f}M parameters", args.out / "loss.png")
    print(f"\n{escaped(text)}\n\nwrote checkpoint.pt, loss.png, sample.txt and tensorboard/ to {args.out}")
    if began_at >= args.steps:
        more = f"--resume --out {args.out} --steps {2 * began_at}"
        print(f"the run had made its {began_at} steps already; {more} continues it")
    return run


def escaped(text: str) -> str:
    r"""The text with its control characters, which would act on a terminal, written out, as \x1b; lines stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def prepare(argv: list[str] | None, args: argparse.Namespace) -> tuple[argparse.Namespace, dict[str, Any] | None]:
    """Settles the folder before anything is computed; with --resume, also the checkpoint and the options in it."""
    try:
        optimizers.find(args.optimizer)
    except ValueError as error:
        raise UserError(str(error)) from error
    state = None
    if args.resume:
        out = args.out or run_folder.latest(RUNS, args.optimizer)
        state = run_folder.load(out)
        saved = {k: v for k, v in state["args"].items() if k not in ("out", "resume", "overwrite", "device")}
        args = parse(argv, saved)
        args.out = out
        changed = [name for name in FIXED if getattr(args, name) != saved[name]]
        if changed:
            raise UserError(f"a resumed run cannot change {changed[0]}, {saved[changed[0]]} in {out}")
    elif args.out is None:
        args.out = run_folder.claim(RUNS, args.optimizer)
    elif not args.overwrite:
        run_folder.refuse_used(args.out)
    run_folder.check_writable(args.out)
    return args, state


def main(argv: list[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # not every terminal can show every sample
    args = parse(argv)
    claimed = args.out is None and not args.resume
    try:
        args, state = prepare(argv, args)
        train(args, state)
        return 0
    except (UserError, corpus.CorpusError, run_folder.FolderError) as error:
        return fail(str(error))
    except FloatingPointError as error:
        return fail(f"training stopped: {error}{kept(args)}")
    except torch.cuda.OutOfMemoryError:
        return fail("out of GPU memory: try --checkpoint-blocks, or a smaller --context or --batch")
    except OSError as error:
        return fail(f"cannot write to {args.out}: {error.strerror or error}{kept(args)}")
    except KeyboardInterrupt:
        return fail(f"interrupted{kept(args)}", code=130)
    finally:
        if claimed and args.out is not None:
            with contextlib.suppress(OSError):  # it is not empty
                args.out.rmdir()


def kept(args: argparse.Namespace) -> str:
    path = args.out and args.out / run_folder.CHECKPOINT
    return f"; the last good checkpoint is {path}, --resume --out {args.out} goes on" if path and path.exists() else ""


def fail(message: str, code: int = 2) -> int:
    print(f"train_gpt.py: error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
