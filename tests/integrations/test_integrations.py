"""The examples of integrations learn, and update the curvature when it is due."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sorder

FOLDER = Path(__file__).parents[2] / "examples" / "integrations"


@pytest.fixture(autouse=True)
def updates(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of the steps whose curvature was estimated."""
    monkeypatch.syspath_prepend(str(FOLDER))
    found: list[int] = []
    for kind in (sorder.SophiaH, sorder.SophiaG):
        whole = kind._estimate

        def counted(self: Any, *args: Any, whole: Any = whole) -> Any:
            found.append(self._number + 1)
            return whole(self, *args)

        monkeypatch.setattr(kind, "_estimate", counted)
    yield found
    sys.modules.pop("byte_model", None)


@pytest.mark.parametrize(
    ("needs", "example"),
    [("lightning", "lightning_sophia"), ("accelerate", "accelerate_sophia"), ("transformers", "trainer_sophia")],
)
@pytest.mark.filterwarnings("ignore")  # what these libraries say of themselves
def test_it_learns(needs: str, example: str, updates: list[int]) -> None:
    pytest.importorskip(needs)
    result = importlib.import_module(example).main(epochs=4)
    losses = result if isinstance(result, list) else result.losses
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    assert updates == list(range(1, 29, 5))
