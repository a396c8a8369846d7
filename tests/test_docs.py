"""Every snippet of the README and every example of a public docstring runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import sorder

README = Path(__file__).parents[1] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
MODULES = sorted(
    m.name for m in pkgutil.walk_packages(sorder.__path__, "sorder.") if not m.name.startswith("sorder.kernels")
)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_readme(snippet: str) -> None:
    exec(compile(snippet, "README.md", "exec"), {"__name__": "readme"})


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 4


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module: str) -> None:
    names = {"torch": torch, "sorder": sorder, "F": torch.nn.functional, "nn": torch.nn}
    failures, _ = doctest.testmod(
        importlib.import_module(module), extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    )
    assert failures == 0


@pytest.mark.parametrize("name", [n for n in sorder.__all__ if callable(getattr(sorder, n))])
def test_public_names_have_an_example(name: str) -> None:
    assert ">>>" in (getattr(sorder, name).__doc__ or "")
