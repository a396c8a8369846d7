"""The example as a user runs it: files in, files out, clear errors, bitwise resumption."""

from __future__ import annotations

import importlib
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sorder

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--context=16", "--batch=2", "--layers=1", "--width=16", "--heads=2", "--windows=2", "--eval-every=3"]
SMALL += ["--sample=5"]


def run(example: Any, *arguments: object) -> int:
    return example.main([*SMALL, "--device", "cpu", *map(str, arguments)])


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *SMALL, "--device=cpu", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return subprocess.run(command, capture_output=True, env=environment, **options)


# ---------------------------------------------------------------------- a run


@pytest.mark.filterwarnings("error:Using backward.. with create_graph")
@pytest.mark.parametrize(
    "optimizer",
    [
        *("newton-cg", "newton-cg --preconditioner diagonal", "newton-cg --preconditioner kfac"),
        *("newton-cg --preconditioner ekfac", "kfac", "sophia-h", "sophia-g", "adahessian"),
        *("adamw", "muon", "Yogi", "adafactor"),
    ],
)
def test_resumes_bit_identically(example: Any, text: Path, tmp_path: Path, optimizer: str) -> None:
    options = ["--data", text, "--optimizer", *optimizer.split()]
    steps = 12 if optimizer.startswith("sophia") else 6  # Sophia measures curvature at steps 1 and 11
    assert run(example, *options, "--steps", steps, "--out", tmp_path / "a") == 0
    assert run(example, *options, "--steps", 3, "--out", tmp_path / "b") == 0
    torch.manual_seed(123)  # as in a new process
    assert run(example, "--resume", "--steps", steps, *options, "--out", tmp_path / "b") == 0
    straight, resumed = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in "ab")
    assert straight["step"] == resumed["step"] == steps
    assert [h["loss"] for h in straight["history"]] == [h["loss"] for h in resumed["history"]]
    assert straight["history"][2]["loss"] != straight["history"][5]["loss"]
    assert_same(straight["model"], resumed["model"])
    assert_same(straight["optimizer"], resumed["optimizer"])
    assert torch.equal(straight["random"], resumed["random"])
    assert (tmp_path / "a/sample.txt").read_text() == (tmp_path / "b/sample.txt").read_text()


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


SCALARS = {
    "newton-cg": {"CG iterations", "products", "damping", "reduction ratio", "curvature along the step", "step length"},
    "kfac": {
        *("learning rate of the model", "momentum of the model", "products", "damping", "reduction ratio"),
        "step length",
    },
    "sophia": {"win rate", "curvature norm", "update norm"},
}


@pytest.mark.parametrize("optimizer", ["newton-cg", "kfac", "sophia-h", "sophia-g", "adahessian", "adamw", "muon"])
def test_learns_and_leaves_its_files(example: Any, text: Path, tmp_path: Path, optimizer: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "out"
    assert run(example, "--data", text, "--optimizer", optimizer, "--steps", 12, "--out", out) == 0
    history = torch.load(out / "checkpoint.pt", weights_only=True)["history"]
    assert history[-1]["held_out"] < min(history[2]["held_out"], 8.0)  # bits; a uniform guess costs 8
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "sample.txt").read_text(encoding="utf-8").startswith("import ")
    assert not list(out.glob("*.tmp"))
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"loss", "held-out bits per byte", "tokens per second", "peak memory (GB)"} <= tags
    family = optimizer.removesuffix("-h").removesuffix("-g")
    assert {tag for tag in tags if "/" in tag} == {f"{family}/{name}" for name in SCALARS.get(family, ())}


def test_a_sample_does_not_act_on_the_terminal(example: Any) -> None:
    assert example.escaped("import \x1b[31m\r\x07\x00é\n\u202e") == "import \\x1b[31m\\r\\x07\\x00é\n\\u202e"


def test_checkpointed_blocks_give_the_same_derivatives(_path: None) -> None:
    gpt = importlib.import_module("gpt")
    model = gpt.GPT(256, 16, 2, 2).double()
    tokens = torch.randint(256, (2, 9))
    params = {name: p.detach() for name, p in model.named_parameters()}
    tangents = {name: torch.randn_like(p) for name, p in params.items()}

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, params, (tokens,)).logsumexp(-1).sin().sum()

    found = []
    for recompute in (False, True):
        model.checkpoint_blocks = recompute
        with sorder.exact_attention():
            found.append(torch.func.jvp(torch.func.grad(loss), (params,), (tangents,)))
    for plain, recomputed in zip(*found, strict=True):
        for name in params:
            assert (recomputed[name] - plain[name]).norm() <= 1e-12 * plain[name].norm(), name
            assert plain[name].norm() > 0, name


def test_the_model_is_causal(_path: None) -> None:
    gpt = importlib.import_module("gpt")
    model = gpt.GPT(256, 16, 2, 2)
    tokens = torch.randint(256, (1, 9))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :5], b[:, :5])
    assert not torch.allclose(a[:, 5:], b[:, 5:])


# ---------------------------------------------------------------------- data


def test_corpus_of_a_folder_a_glob_and_the_standard_library(_path: None, tmp_path: Path) -> None:
    corpus = importlib.import_module("corpus")
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([i]) * 10)
    (tmp_path / "other.md").write_bytes(b"#" * 10)
    folder, pattern = corpus.load(str(tmp_path), 4), corpus.load(str(tmp_path / "*.txt"), 4)
    assert bytes(folder.held_out) == bytes(pattern.held_out) == bytes([10] * 10 + [30] * 10)
    assert len(folder.train) == 390 and len(pattern.train) == 380
    assert folder.fingerprint != pattern.fingerprint
    assert torch.equal(pattern.batch(3, 2, 4, 0), pattern.batch(3, 2, 4, 0))
    assert not torch.equal(pattern.batch(3, 2, 4, 0), pattern.batch(4, 2, 4, 0))
    library = corpus.load(None, 256)
    assert len(library.train) > 1_000_000 and b"def " in bytes(library.held_out)


# ---------------------------------------------------------------------- errors


WRONG = {
    "no path": ("--data=", "'' does not exist"),
    "no such path": ("--data {tmp}/missing", "does not exist"),
    "empty folder": ("--data {tmp}/empty", "no text"),
    "glob without files": ("--data {tmp}/*.none", "no text"),
    "context longer than the text": ("--context 10000", "context 10000 is too long"),
    "context longer than the held-out text": ("--context 300", "takes --context 224 or less, or a file of 6020 bytes"),
    "no context is short enough": ("--data {tmp}/short.txt", "; it takes a file of 340 bytes"),
    "impossible path": (f"--data {'x' * 300}", "File name too long"),
    "width": ("--width 15", "width 15"),
    "optimizer": ("--optimizer sgdx", "no optimizer 'sgdx'"),
    "preconditioner of another": ("--optimizer adamw --preconditioner kfac", "--preconditioner is for newton-cg"),
    "wraps another": ("--optimizer lookahead", "no optimizer 'lookahead'"),
    "rate of its own": ("--optimizer adafactor --lr 0.1", "takes no --lr"),
    "device": ("--device cuda:7", "device 'cuda:7'"),
    "no such device": ("--device abacus", "device 'abacus'"),
    "device without values": ("--device meta", "device 'meta'"),
    "nothing to resume": ("--resume", "nothing to resume"),
    "broken checkpoint": ("--resume --out {tmp}/garbage", "not a readable checkpoint"),
    "not our checkpoint": ("--resume --out {tmp}/other", "not a checkpoint of this example"),
    "out cannot be made": ("--out /proc/none", "cannot write to /proc/none"),
    "out is a file": ("--optimizer adamw --out {tmp}/text.txt", "cannot write"),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_line_errors(
    example: Any, text: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage/checkpoint.pt").write_bytes(b"not a checkpoint")
    (tmp_path / "other").mkdir()
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other/checkpoint.pt")
    (tmp_path / "short.txt").write_text("short")
    options, message = WRONG[case]
    arguments = options.format(tmp=tmp_path).split()
    assert run(example, "--data", text, "--out", tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("train_gpt.py: error: ") and message in error
    assert error.count("\n") == 1


def test_a_resumed_run_cannot_change_what_it_is(
    example: Any, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--optimizer", "adamw", "--out", tmp_path / "out"]
    assert run(example, "--data", text, "--steps", 3, *options) == 0
    for option, value, old in (("seed", 5, 0), ("preconditioner", "kfac", "none")):
        assert run(example, "--resume", *options, f"--{option}", value) == 2
        assert f"cannot change {option}, {old} in" in capsys.readouterr().err
    whole = text.read_text()
    for changed in (whole.upper(), whole[:-1] + "!"):  # the last bytes are held out
        text.write_text(changed)
        assert run(example, "--resume", *options, "--steps", 6) == 2
        assert "not the one that the checkpoint was trained on" in capsys.readouterr().err
    moved = text.rename(tmp_path / "moved.txt")
    moved.write_text(whole)
    assert run(example, "--resume", *options, "--steps", 4, "--data", moved) == 0


def test_a_full_disk_keeps_the_last_good_checkpoint(example: Any, text: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    out = tmp_path / "out"
    options = ["--optimizer", "adamw", "--data", str(text), "--out", str(out)]
    assert run(example, *options, "--steps", 3) == 0
    good = (out / "checkpoint.pt").read_bytes()

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(good) // 2, len(good) // 2))

    full = process(*options, "--steps=6", "--resume", preexec_fn=limit)
    assert full.returncode == 2
    errors = full.stderr.decode()
    assert "Traceback" not in errors
    last = errors.strip().splitlines()[-1]
    assert "cannot write" in last and "the last good checkpoint is" in last
    assert (out / "checkpoint.pt").read_bytes() == good
    assert not list(out.glob("*.tmp"))


def test_a_loss_that_is_not_finite_stops(
    example: Any, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(example, "--data", text, "--optimizer", "adamw", "--lr", 1e30, "--steps", 9, "--out", out) == 2
    assert "training stopped" in capsys.readouterr().err


def test_interruption(
    example: Any, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    advance = example.Run.advance

    def interrupted(self: Any) -> float:
        if self.step == 4:
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(example.Run, "advance", interrupted)
    assert run(example, "--data", text, "--optimizer", "adamw", "--steps", 6, "--out", out) == 130
    assert f"--resume --out {out} goes on" in capsys.readouterr().err
    assert torch.load(out / "checkpoint.pt", weights_only=True)["step"] == 3
