"""Tuning of launch settings, with a stopwatch that the test winds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from sorder.kernels import autotune
from sorder.kernels.launch import Config

DEVICE = torch.device("cuda", 0)
START = Config(64, 32, 4, 2)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Config]:
    """The settings tried; smaller tiles are faster, but tiles of 16 rows do not fit."""
    tried: list[Config] = []
    monkeypatch.setenv("SORDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Some GPU (40 GB)")

    def milliseconds(run):  # type: ignore[no-untyped-def]
        run()
        return tried[-1].rows * tried[-1].cols + tried[-1].stages / 10 + tried[-1].warps / 100

    monkeypatch.setattr(autotune, "_milliseconds", milliseconds)
    return tried


def tune(tried: list[Config], *key: object) -> Config:
    def attempt(config: Config) -> None:
        if config.rows == 16:
            raise RuntimeError("too small")
        tried.append(config)

    return autotune.tuned(key, START, attempt, DEVICE)


def test_the_fastest_that_fits_is_taken(attempts: list[Config]) -> None:
    assert tune(attempts, "tangent", 64) == Config(32, 32, 4, 1)
    assert attempts[0] == START
    assert len(set(attempts)) == len(attempts) > 10


def test_it_is_found_again_on_disk(attempts: list[Config], tmp_path: Path) -> None:
    first = tune(attempts, "tangent", 64)
    attempts.clear()
    assert tune(attempts, "tangent", 64) == first
    assert not attempts
    tune(attempts, "tangent", 128)
    assert attempts
    assert [p.name for p in tmp_path.iterdir()] == [autotune._cache_file(DEVICE).name]


def test_a_broken_file_is_replaced(attempts: list[Config]) -> None:
    autotune._cache_file(DEVICE).write_text("{")
    assert tune(attempts, "tangent", 64) == Config(32, 32, 4, 1)
    assert autotune._read(autotune._cache_file(DEVICE)) == {"('tangent', 64)": [32, 32, 4, 1]}


def test_where_nothing_fits_the_setting_stays(attempts: list[Config]) -> None:
    def attempt(config: Config) -> None:
        raise RuntimeError("never fits")

    assert autotune.tuned(("forward",), START, attempt, DEVICE) == START


@pytest.mark.parametrize(("value", "on"), [(None, False), ("0", False), ("", False), ("1", True)])
def test_only_where_asked_for(value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("SORDER_AUTOTUNE", raising=False)
    else:
        monkeypatch.setenv("SORDER_AUTOTUNE", value)
    assert autotune.enabled() == on
