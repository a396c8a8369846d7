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
    out = tmp_path / "results.json"
    importlib.import_module("kfac_autoencoder").main(["--smoke", "--device=cpu", "--commit=abc", f"--out={out}"])
    results = json.loads(out.read_text())
    assert results["environment"]["commit"] == "abc"
    shampoo = set() if results["left out"] else {"shampoo"}
    assert set(results["best"]) == {"sgd", "adamw", "newton-cg", "kfac", "hybrid"} | shampoo
    starts = {run["curve"][0]["error"] for run in results["runs"]}
    assert len(starts) == 1, "the same model on the same images"
    assert all(run["failed"] is None and run["steps"] == 3 for run in results["runs"])
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_gpt(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    arguments = ["--smoke", "--device=cpu", "--commit=abc", f"--out={out}", "--seconds=1.5"]
    importlib.import_module("kfac_gpt").main([*arguments, "--options", '{"hybrid": {"cg_iterations": 2}}'])
    results = json.loads(out.read_text())
    assert len({run["curve"][0]["held_out"] for run in results["runs"]}) == 1
    tokens = [run for run in results["runs"] if run["role"] == "equal tokens"]
    assert len({run["steps"] for run in tokens}) == 1 and all(run["error"] is None for run in tokens)
    table = results["summary"]
    assert {f"{name}, equal tokens" for name in ("hybrid", "newton-cg", "kfac", "adamw", "muon", "kfac-kl")} <= set(
        table
    )
    assert "adamw, equal seconds" in table
    steps = tokens[0]["steps"]
    assert table["hybrid, equal tokens"]["cg_iterations"] == 2 * steps
    assert table["newton-cg, equal tokens"]["cg_iterations"] > 2 * steps


def test_cg_iterations(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    importlib.import_module("kfac_cg_iterations").main(["--smoke", "--device=cpu", "--commit=abc", f"--out={out}"])
    first, second = json.loads(out.read_text())["points"]
    assert (first["step"], second["step"]) == (0, 1) and second["loss"] != first["loss"] and first["damping"] > 0.0
    for row in first["iterations"].values():
        found = [row[t] for t in ("0.3", "0.1", "0.03") if row[t] is not None]
        assert found == sorted(found) and found[0] >= 1


@pytest.mark.parametrize("minutes", [0.0, 1.0])
def test_cg_iterations_end_with_the_time(
    minutes: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No solve begins behind the deadline, and what was measured before is kept."""
    benchmark, out = importlib.import_module("kfac_cg_iterations"), tmp_path / "results.json"
    clock = [0.0]
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: clock[0])
    solve, solves = benchmark.cg, []

    def cg(*args: object, **options: object) -> object:
        solves.append(clock[0])
        clock[0] += 9.0
        return solve(*args, **options)

    monkeypatch.setattr(benchmark, "cg", cg)
    benchmark.main(["--smoke", "--device=cpu", "--commit=abc", f"--out={out}", f"--minutes={minutes}"])
    points = json.loads(out.read_text())["points"]
    assert all(at < 60.0 * minutes for at in solves)
    assert [list(point["iterations"]) for point in points] == ([["none"]] if minutes else [])
    assert "minutes were up after" in capsys.readouterr().out
