"""Which folder a run gets, what it refuses to replace, and what a second run finds there."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.test_train_gpt import process, run

ADAMW = ("--optimizer", "adamw")


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_used_folder_is_refused_and_stays_as_it_is(
    example: Any, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(example, "--data", text, *ADAMW, "--steps", 3, "--out", out) == 0
    before = files(out)
    capsys.readouterr()
    assert run(example, "--data", text, *ADAMW, "--steps", 3, "--out", out) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(part in error for part in (str(out), "--resume", "another --out", "--overwrite"))
    assert files(out) == before


def test_overwrite_removes_the_run_and_nothing_else(example: Any, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(example, "--data", text, *ADAMW, "--steps", 6, "--out", out) == 0
    (out / "notes.txt").write_text("mine")
    (out / "more").mkdir()
    (out / "more/checkpoint.pt").write_text("mine")
    old = set((out / "tensorboard").iterdir())
    # A request that fails has replaced nothing.
    before = files(out)
    assert run(example, "--data", tmp_path / "none", *ADAMW, "--out", out, "--overwrite") == 2
    assert files(out) == before
    assert run(example, "--data", text, *ADAMW, "--steps", 3, "--out", out, "--overwrite") == 0
    assert torch.load(out / "checkpoint.pt", weights_only=True)["step"] == 3
    assert len(list((out / "tensorboard").iterdir())) == 1 and not old & set((out / "tensorboard").iterdir())
    assert (out / "notes.txt").read_text() == (out / "more/checkpoint.pt").read_text() == "mine"


@pytest.mark.parametrize("options", [["--overwrite"], ["--overwrite", "--resume", "--out=x"], ["--seed=-1"]])
def test_options_that_make_no_sense(example: Any, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(example, *options)
    assert "error: " in capsys.readouterr().err


def test_without_out_each_run_has_its_folder_and_resume_takes_the_last(
    example: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs/train_gpt"

    def steps() -> dict[str, int]:
        return {p.parent.name: torch.load(p, weights_only=True)["step"] for p in runs.glob("*/checkpoint.pt")}

    options = ("--data", text, *ADAMW)
    for _ in range(3):
        assert run(example, *options, "--steps", 1) == 0
    (runs / "adamw-2").rename(runs / "adamw-kept")
    assert run(example, *options, "--steps", 2) == 0
    assert steps() == {"adamw": 1, "adamw-kept": 1, "adamw-3": 1, "adamw-4": 2}
    assert run(example, *ADAMW, "--steps", 4, "--resume") == 0
    assert steps() == {"adamw": 1, "adamw-kept": 1, "adamw-3": 1, "adamw-4": 4}
    assert run(example, "--data", text, *ADAMW, "--width", 15) == 2
    assert not (runs / "adamw-5").exists()  # a request that fails takes no number


@pytest.mark.parametrize("out", ["text.txt", "/proc/none", "full"])
def test_a_bad_folder_is_reported_first(
    example: Any,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    out: str,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the folder should have been looked at before")

    monkeypatch.setattr(example, "GPT", never)
    monkeypatch.setattr(example.corpus, "load", never)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if out == "full":  # files of no byte stand for the full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        assert example.main(["--device=cpu", "--out", str(tmp_path / out)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"cannot write to {tmp_path / out}" in capsys.readouterr().err


def test_a_finished_run_says_how_to_continue(
    example: Any, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--data", text, *ADAMW, "--out", tmp_path / "out")
    assert run(example, *options, "--steps", 3) == 0
    assert "already" not in capsys.readouterr().out
    assert run(example, *options, "--resume") == 0
    hint = f"had made its 3 steps already; --resume --out {tmp_path / 'out'} --steps 6 continues it"
    assert hint in capsys.readouterr().out


def test_the_progress_bar_knows_the_first_evaluation(
    example: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(example.tqdm, "set_postfix_str", lambda self, s: shown.append(s))
    assert run(example, "--data", text, *ADAMW, "--steps", 2, "--eval-every", 9, "--out", tmp_path / "out") == 0
    assert len(shown) == 2
    assert 7.5 < float(shown[0].split("held-out ")[1].split()[0]) < 8.5


def test_tensorboard_keeps_every_step_of_a_resumed_run(example: Any, text: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = ("--data", text, *ADAMW, "--out", tmp_path / "out")
    assert run(example, *options, "--steps", 3) == 0
    assert run(example, *options, "--steps", 6, "--resume") == 0
    events = EventAccumulator(str(tmp_path / "out/tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [e.step for e in events.Scalars("held-out bits per byte")] == [0, 3, 6]


def test_a_run_interrupted_before_its_first_evaluation_resumes(
    example: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--data", text, *ADAMW, "--steps", 3)
    with monkeypatch.context() as patch:

        def interrupted(_: Any) -> float:
            raise KeyboardInterrupt

        patch.setattr(example.Run, "advance", interrupted)
        assert run(example, *options, "--out", tmp_path / "a") == 130
    assert run(example, *options, "--out", tmp_path / "a", "--resume") == 0
    assert run(example, *options, "--out", tmp_path / "b") == 0
    a, b = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["history"] for name in "ab")
    assert a == b


def test_binary_text_on_a_terminal_of_ascii(text: Path, tmp_path: Path) -> None:
    """Such a sample has bytes that the terminal cannot show, and some that would command it."""
    text.write_bytes(bytes(range(256)) * 20)
    found = process(
        f"--data={text}", "--optimizer=adamw", "--steps=1", "--sample=200", f"--out={tmp_path / 'out'}", "--context=1",
        env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    shown = found.stdout.decode("ascii")
    assert all(c.isprintable() or c == "\n" for c in shown)
    sample = (tmp_path / "out/sample.txt").read_text(encoding="utf-8")
    assert not all(c.isprintable() or c == "\n" for c in sample)
