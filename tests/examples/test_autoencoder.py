"""The autoencoder example: its data, its model, and every optimizer for a few steps."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

ARGUMENTS = ["--side=6", "--widths", "8", "5", "3", "2", "--images=40", "--batch=40", "--device=cpu", "--quiet"]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module("autoencoder")


def test_curves_are_images_of_one_line_each(example: Any) -> None:
    images = example.curves(300, 16)
    assert images.shape == (300, 256) and images.min() >= 0.0 and images.max() <= 1.0
    assert torch.equal(images, example.curves(300, 16)) and not torch.equal(images, example.curves(300, 16, seed=1))
    assert (images.amax(1) > 0.7).all(), "every image has ink"
    assert (images > 0.3).float().mean() < 0.3, "most of it is white"
    assert len(images.unique(dim=0)) == 300


def test_the_autoencoder_has_eight_layers_and_sparse_weights(example: Any) -> None:
    model = example.autoencoder(64, [32, 24, 20, 6])
    linear = [m for m in model if isinstance(m, torch.nn.Linear)]
    assert [m.in_features for m in linear] == [64, 32, 24, 20, 6, 20, 24, 32]
    assert sum(isinstance(m, torch.nn.Sigmoid) for m in model) == 6, "the code and the logits are linear"
    assert all(((m.weight != 0).sum(1) == min(15, m.in_features)).all() for m in linear)


@pytest.mark.parametrize("name", ["kfac", "hybrid", "newton-cg", "sgd", "adamw", "shampoo"])
def test_every_optimizer_lowers_the_error(example: Any, name: str) -> None:
    if name == "shampoo":
        pytest.importorskip("torch_optimizer")
    training = example.Training(name, example.parse([*ARGUMENTS, "--steps=12"]))
    run = training.run()
    assert run["failed"] is None and run["steps"] == 12
    assert run["error"] < run["curve"][0]["error"]
    assert [p["step"] for p in run["curve"]] == list(range(13))


def test_the_command_writes_what_it_says(example: Any, tmp_path: Path) -> None:
    assert example.main([*ARGUMENTS, "--steps=2", "--optimizer", "kfac", "adamw", f"--out={tmp_path}"]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [run["optimizer"] for run in results["runs"]] == ["kfac", "adamw"] and results["settings"]["side"] == 6
    assert results["runs"][0]["curve"][0]["error"] == results["runs"][1]["curve"][0]["error"]
    for picture in ("error.png", "reconstructions.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
