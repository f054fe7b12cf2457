"""Tests and benchmarks reach into our modules, some of them on a GPU alone: what they name there exists."""

from __future__ import annotations

import ast
import importlib
import types
from pathlib import Path

import pytest
from dgl_compare import dgl  # noqa: F401  (as it is imported here, or skipped)

pytest.importorskip("torch_geometric")
ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
MISSING = object()


def found(module: str, name: str):
    """What `from module import name` gives, or MISSING."""
    given = getattr(importlib.import_module(module), name, MISSING)
    if given is MISSING and importlib.util.find_spec(module).submodule_search_locations:
        try:
            return importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError:
            return MISSING
    return given


def unknown(text: str) -> list[tuple[int, str]]:
    """(line, name) of what a source imports from our modules, reads of them or writes to them, and they lack."""
    tree, lacking, modules = ast.parse(text), [], {}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(path), names=aliases) if path.partition(".")[0] == "gnnaccel":
                for alias in aliases:
                    given = found(path, alias.name)
                    if given is MISSING:
                        lacking.append((node.lineno, alias.name))
                    elif isinstance(given, types.ModuleType):
                        modules[alias.asname or alias.name] = given.__name__
            case ast.Assign(
                [ast.Name(name)], ast.Call(ast.Attribute(attr="import_module"), [ast.Constant(path)])
            ) | ast.Assign([ast.Name(name)], ast.Subscript(ast.Attribute(attr="modules"), ast.Constant(path))) if (
                path.partition(".")[0] == "gnnaccel"
            ):
                modules[name] = path
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            modules.pop(node.arg, None)  # a fixture of that name
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name(name), member) | ast.Call(
                ast.Attribute(attr="setattr"), [ast.Name(name), ast.Constant(member), *_]
            ) if name in modules and found(modules[name], member) is MISSING:
                lacking.append((node.lineno, member))
    return sorted(lacking)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_exist(path):
    lacking = unknown(path.read_text("utf-8"))
    assert not lacking


def test_what_is_missing_is_found():
    text = """
from gnnaccel.ops import _bias as b, gone, spmm
module = importlib.import_module("gnnaccel.ops.spmm")
b.gone(spmm.gone)
module.gone = 1
monkeypatch.setattr(module, "gone", 1)
"""
    assert [line for line, _ in unknown(text)] == [2, 4, 5, 6]
