"""The benchmark of optimizer steps runs at tiny sizes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_optimizer_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    out = tmp_path / "steps.json"
    module = importlib.import_module("optimizer_step")
    module.main(["--smoke", "--device=cpu", "--commit=abc", f"--out={out}"])
    rows = json.loads(out.read_text())["rows"]
    assert [r["part"] for r in rows] == ["step"] * 5 + ["kernels"] * 2 + ["training"] * 5
    assert [r["kernel"] for r in rows[5:7]] == ["search", "step"] and all(r["milliseconds"] > 0 for r in rows[5:7])
    for row in rows[:5] + rows[7:]:
        assert row["ratio_to_fused_adamw"] > 0
        assert ("seconds_with_update" in row) == (
            row["part"] == "training" and not row["optimizer"].startswith("AdamW")
        )
    small = sum(p.numel() for p in module.parameters(12, 768, 50_257, 1024, "meta"))
    assert small == 124_439_808, "GPT-2 small"
