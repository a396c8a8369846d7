"""Every snippet of the README and every example of a public docstring runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
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


@pytest.mark.parametrize(
    "package", ["sorder", *(f"sorder.{n}" for n in ("curvature", "func", "kfac", "linalg", "optim"))]
)
def test_a_package_shows_what_it_means_to_and_all_of_that_is_documented(package: str) -> None:
    """Beside submodules, which the library itself imports from."""
    module = importlib.import_module(package)
    shown = {n for n, v in vars(module).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert shown <= set(module.__all__)
    assert all(getattr(module, name).__doc__ for name in module.__all__)


def test_what_the_help_of_the_package_names_is_there() -> None:
    assert "diagonal" in sorder.curvature.__all__
    named = re.search(r"``sorder.func`` \((.*?)\n", sorder.__doc__ or "")
    assert named and set(re.findall(r"``(\w+)``", named.group(1))) <= set(sorder.func.__all__)
    assert {"hutchinson", "bekas", "exact"} <= set(sorder.curvature.diagonal.__all__)
    for name in sorder.curvature.diagonal.__all__:
        assert callable(getattr(sorder.curvature.diagonal, name))
