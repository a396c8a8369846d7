"""Text as bytes, from files on this machine."""

from __future__ import annotations

import glob
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_SHARE = 20  # one file in twenty, or a twentieth of the bytes where there are few files


class CorpusError(Exception):
    """What is wrong with the data, in one line."""


@dataclass
class Corpus:
    """Training and held-out bytes (uint8, one dimension)."""

    train: Tensor
    held_out: Tensor

    @property
    def fingerprint(self) -> int:
        """Tells whether two runs read the same bytes, and hold the same ones out."""
        number = zlib.crc32(len(self.train).to_bytes(8, "little"))
        for part in (self.train, self.held_out):
            number = zlib.crc32(part.numpy().data, number)
        return number

    def batch(self, step: int, batch: int, context: int, seed: int) -> Tensor:
        """(batch, context + 1) training tokens (int64). The windows are a function of ``seed`` and ``step`` alone."""
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        starts = torch.randint(len(self.train) - context, (batch,), generator=generator)
        return _windows(self.train, starts, context)

    def evaluation(self, count: int, context: int) -> Tensor:
        """(at most ``count``, context + 1) held-out tokens, evenly spread."""
        count = min(count, (len(self.held_out) - 1) // context)
        starts = torch.linspace(0, len(self.held_out) - context - 1, count).long()
        return _windows(self.held_out, starts, context)


def load(data: str | None, context: int) -> Corpus:
    """The corpus at a file, folder or glob; by default the sources of the running Python's standard library.

    Raises:
        CorpusError: nothing is there, it cannot be read, or it is shorter than two contexts.
    """
    source = sysconfig.get_paths()["stdlib"] if data is None else data
    try:
        files = list(_standard_library(Path(source)) if data is None else _files(source))
        texts = [text for path in files if (text := path.read_bytes())]
    except OSError as error:
        raise CorpusError(f"cannot read {error.filename or source}: {error.strerror or error}") from error
    if not texts:
        raise CorpusError(f"no text: {source!r} names no file with a byte in it")
    if len(texts) >= HELD_OUT_SHARE:
        train = b"".join(t for i, t in enumerate(texts) if i % HELD_OUT_SHARE != HELD_OUT_SHARE // 2)
        held_out = b"".join(texts[HELD_OUT_SHARE // 2 :: HELD_OUT_SHARE])
    else:
        text = b"".join(texts)
        cut = len(text) - len(text) // HELD_OUT_SHARE
        train, held_out = text[:cut], text[cut:]
    longest = min(len(train), len(held_out)) - 1
    if context > longest:
        raise CorpusError(
            f"context {context} is too long for the {len(train)} training and {len(held_out)} held-out bytes of "
            f"{source!r}; it takes {f'--context {longest} or less, or ' if longest > 0 else ''}a file of "
            f"{HELD_OUT_SHARE * (context + 1)} bytes"
        )
    return Corpus(*(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out)))


def _files(data: str) -> list[Path]:
    path = Path(data)
    found = path.rglob("*") if path.is_dir() else map(Path, sorted(glob.glob(data, recursive=True)))
    if not data or (not path.exists() and not glob.has_magic(data)):
        raise CorpusError(f"{data!r} does not exist")
    return sorted(p for p in found if p.is_file())


def _standard_library(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED & set(path.relative_to(root).parts):
            yield path


def _windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    return torch.stack([text[s : s + context + 1] for s in starts.tolist()]).long()
