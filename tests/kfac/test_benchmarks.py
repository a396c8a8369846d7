"""The K-FAC benchmarks run at tiny sizes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_autoencoder(tmp_path: Path) -> None:
    pytest.importorskip("torch_optimizer")
    out = tmp_path / "results.json"
    importlib.import_module("kfac_autoencoder").main(["--smoke", "--device=cpu", "--commit=abc", f"--out={out}"])
    results = json.loads(out.read_text())
    assert results["environment"]["commit"] == "abc"
    assert set(results["best"]) == {"sgd", "adamw", "shampoo", "newton-cg", "kfac", "hybrid"}
    starts = {run["curve"][0]["error"] for run in results["runs"]}
    assert len(starts) == 1, "the same model on the same images"
    assert all(run["failed"] is None and run["steps"] == 3 for run in results["runs"])
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_gpt(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    importlib.import_module("kfac_gpt").main(["--smoke", "--device=cpu", "--commit=abc", f"--out={out}"])
    results = json.loads(out.read_text())
    assert len({run["curve"][0]["held_out"] for run in results["runs"]}) == 1
    assert all(run["error"] is None and run["steps"] == 2 for run in results["runs"])
    assert {"newton-cg", "hybrid", "kfac", "kfac-kl", "adamw", "muon"} <= set(results["summary"])
