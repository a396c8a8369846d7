"""The benchmarks run at tiny sizes, and what they time is right."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_gpt_hvp(tmp_path: Path) -> None:
    out = tmp_path / "hvp.json"
    importlib.import_module("gpt_hvp").main(["--smoke", "--device=cpu", "--commit=abc", f"--out={out}"])
    results = json.loads(out.read_text())
    assert results["environment"]["commit"] == "abc"
    assert len(results["rows"]) == 10
    for row in results["rows"]:
        assert "error" not in row, row
        assert row["seconds"] > 0
        if row["part"] != "gradient":
            assert row["product_norm"] > 0
            assert row["relative_difference"] < 2e-2  # of two ways to the same product, in bfloat16


def test_train_gpt_compare(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    compare = importlib.import_module("train_gpt_compare")
    out = tmp_path / "compare.json"
    compare.Comparison(compare.parse(["--smoke", "--device=cpu", f"--out={out}"])).all()
    results = json.loads(out.read_text())
    newton, *rivals = results["runs"]
    assert newton["steps"] == 3 and newton["curve"][0]["tokens"] == 0 and newton["curve"][-1]["tokens"] == 96
    for run in rivals:
        assert not run["error"] and not run["truncated"]
        assert run["curve"][0]["held_out"] == newton["curve"][0]["held_out"]  # the same model on the same text
        if run["role"] == "same tokens":
            assert run["steps"] == newton["steps"]
    assert {run["lr"] for run in rivals if run["optimizer"] == "adamw"} >= {2.5e-4, 2e-3}
    ends = {"newton-cg, same tokens", "adamw, same tokens", "adamw, same seconds", "muon, same tokens"}
    assert ends <= set(results["summary"])
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
