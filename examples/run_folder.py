"""The folder that a run writes to: which one it is, whether it may be written, and the checkpoint in it."""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

CHECKPOINT = "checkpoint.pt"
WRITTEN = (CHECKPOINT, "tensorboard", "loss.png", "sample.txt")  # all that a run leaves behind


class FolderError(Exception):
    """What is wrong with the folder or its checkpoint, in one line."""


def claim(parent: Path, name: str) -> Path:
    """Makes the next of ``parent``/``name``, ``name``-2, …; two that start at once get two folders.

    Raises:
        FolderError: it cannot be made.
    """
    number = max(_numbered(parent, name), default=0) + 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise FolderError(f"cannot make {folder}: {error.strerror}") from error


def latest(parent: Path, name: str) -> Path:
    """Of the folders that :func:`claim` makes, the one of the highest number with a checkpoint; else the first."""
    found = {n: folder for n, folder in _numbered(parent, name).items() if (folder / CHECKPOINT).is_file()}
    return found[max(found)] if found else parent / name


def _numbered(parent: Path, name: str) -> dict[int, Path]:
    matches = ((re.fullmatch(re.escape(name) + r"(?:-(\d+))?", path.name), path) for path in parent.glob("*"))
    return {int(match[1] or 1): path for match, path in matches if match}


def refuse_used(folder: Path) -> None:
    """FolderError if a run has written to ``folder``."""
    found = [name for name in WRITTEN if (folder / name).exists()]
    if found:
        raise FolderError(
            f"{folder} already holds a run's {found[0]}: continue it with --resume, choose another --out, "
            "or start afresh with --overwrite"
        )


def check_writable(folder: Path) -> None:
    """Makes ``folder`` unless it is there, and writes a little to it.

    Raises:
        FolderError: that fails.
    """
    if folder.exists() and not folder.is_dir():
        raise FolderError(f"cannot write to {folder}: it is not a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(4096))
            os.fsync(file.fileno())
    except OSError as error:
        raise FolderError(f"cannot write to {folder}: {error.strerror}") from error


def clear(folder: Path) -> None:
    """Removes what a run wrote, and nothing else."""
    for name in (*WRITTEN, _temporary(CHECKPOINT)):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def save(folder: Path, state: dict[str, Any]) -> None:
    """The checkpoint is replaced as a whole or not at all."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    temporary = folder / _temporary(CHECKPOINT)
    try:
        with open(temporary, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / CHECKPOINT)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def load(folder: Path) -> dict[str, Any]:
    """What :func:`save` saved, with tensors on the CPU.

    Raises:
        FolderError: there is no checkpoint, or it cannot be read.
    """
    path = folder / CHECKPOINT
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FolderError(f"nothing to resume: {path} does not exist") from None
    except Exception as error:  # torch documents none; files of other kinds raise half a dozen
        reason = str(error).partition("\n")[0]
        raise FolderError(f"{path} is not a readable checkpoint: {reason}") from error
    if not isinstance(state, dict) or not {"args", "step", "model", "optimizer"} <= state.keys():
        raise FolderError(f"{path} is not a checkpoint of this example")
    return state


def _temporary(name: str) -> str:
    return str(Path(name).with_suffix(".tmp"))
