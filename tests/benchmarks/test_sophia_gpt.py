"""The comparison of Sophia with AdamW runs at tiny sizes, is cut short and goes on."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module("sophia_gpt")


def run(module: Any, out: Path, *arguments: str) -> dict[str, Any]:
    text = out.parent / "text"
    text.write_bytes(bytes(range(256)) * 40)
    args = ["--smoke", "--device=cpu", "--commit=abc", f"--data={text}", f"--out={out}", *arguments]
    module.Comparison(module.parse(args)).all()
    return json.loads(out.read_text())


def test_it_runs_and_goes_on_where_it_was_cut(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "sophia.json"
    results = run(module, out)
    longs = [r["setting"] for r in results["runs"] if r["setting"]["steps"] == results["configuration"]["long"]]
    assert {s["optimizer"] for s in longs} == {"AdamW", "SophiaG", "SophiaH"} == set(results["summary"])
    rates = [r["setting"]["lr"] for r in results["runs"] if r["setting"]["optimizer"] == "AdamW"]
    assert len(set(rates)) >= 5
    for r in results["runs"]:
        assert r["curve"][-1]["step"] == r["setting"]["steps"] and r["seconds"] > 0
        assert ("win_rates" in r) == (r["setting"]["optimizer"] != "AdamW")
    assert out.with_suffix(".png").stat().st_size > 1000

    kept = results["runs"][:-4]
    out.write_text(json.dumps({**results, "runs": kept}))
    trained: list[Any] = []
    make = module.Setting.make
    monkeypatch.setattr(module.Setting, "make", lambda self, *a: trained.append(self) or make(self, *a))
    again = run(module, out)
    assert len(trained) == 4 and again["runs"][: len(kept)] == kept and len(again["runs"]) == len(results["runs"])
    for a, b in zip(again["runs"], results["runs"], strict=True):
        assert a["setting"] == b["setting"] and a["curve"][-1]["held_out"] == pytest.approx(b["curve"][-1]["held_out"])
    with pytest.raises(SystemExit, match="another configuration"):
        run(module, out, "--context=16")


def test_gammas_are_those_of_the_win_rates(module: Any) -> None:
    import sorder

    torch.manual_seed(0)
    net = torch.nn.Linear(30, 30)
    optimizer = sorder.SophiaG(net.parameters(), lr=0.0, betas=(0.0, 0.99))
    x = torch.randn(64, 30)
    optimizer.step(
        lambda: torch.nn.functional.cross_entropy(net(x), torch.arange(64) % 30),
        curvature_closure=lambda: sorder.gnb_loss(net(x)),
    )
    for share, gamma in zip((0.1, 0.5), module.gammas(optimizer, [0.1, 0.5]), strict=True):
        optimizer.param_groups[0]["gamma"] = gamma
        optimizer.step(
            lambda: torch.nn.functional.cross_entropy(net(x), torch.arange(64) % 30),
            curvature_closure=lambda: sorder.gnb_loss(net(x)),
        )
        assert abs(optimizer.last_step.win_rate - share) < 0.1
