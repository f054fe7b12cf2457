"""The examples in the documentation, and in the docstrings of what the package exports, give what they say."""

import doctest
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [path for path in sorted(ROOT.glob("docs/*.md")) if ">>>" in path.read_text("utf-8")]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_page(page):
    failed, tried = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert tried and not failed


MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(ROOT.glob("gnnaccel/**/*.py"))
    if " >>> " in path.read_text("utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(sys.modules[module.__name__])
    assert tried and not failed
