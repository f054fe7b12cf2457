#!/usr/bin/env python3
"""Measures of the package's structure, beside the committed ones: python scripts/house.py [--list WHAT] [--write].

All are read off the syntax of gnnaccel/**/*.py, nothing is imported. They are to fall. CONTRIBUTING.md says what each
is for. `--list` names the places behind one of them, `--write` makes today's the committed figures.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "gnnaccel"
FIGURES = Path(__file__).with_name("house.json")
BOUNDS = "lower/bounds.py"
FRAMEWORKS = {"torch": "touch.py", "PyG": "pyg_backend/touch.py", "DGL": "dgl_backend/touch.py"}
MODULES = {"torch": "torch", "torch_geometric": "PyG", "dgl": "DGL"}
PYTHONS = {"_asdict", "_fields", "_getframe", "_reconstructor", "_replace"}
PLACES = tuple[str, int, str]  # a file, a line, what stands there


class File:
    def __init__(self, path: Path):
        self.name = path.relative_to(ROOT).as_posix()
        self.text = path.read_text("utf-8")
        self.tree = ast.parse(self.text)
        self.nodes = list(ast.walk(self.tree))

    def place(self, node: ast.AST) -> PLACES:
        return self.name, node.lineno, ast.unparse(node).split("\n")[0]  # type: ignore[attr-defined]


def dotted(node: ast.AST) -> str:
    """a.b.c of an attribute, "" of what is no chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    owner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{owner}.{node.attr}" if owner else ""  # type: ignore[attr-defined]


def called(node: ast.AST) -> str:
    return dotted(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""


# ---- what is counted


def lines(files: list[File]) -> Iterator[PLACES]:
    for file in files:
        yield from ((file.name, number, "") for number, _ in enumerate(file.text.splitlines(), 1))


def naming_gatconv(files: list[File]) -> Iterator[PLACES]:
    yield from ((file.name, 1, "GATConv") for file in files if "GATConv" in file.text)


def declining(files: list[File]) -> Iterator[PLACES]:
    """Places of backends, ops and lazy values that leave a call to somebody else."""
    for file in files:
        if not file.name.startswith(("pyg_backend/", "dgl_backend/", "ops/", "lazy/")):
            continue
        for node in file.nodes:
            if isinstance(node, ast.Return) and node.value is not None:
                nothing = isinstance(node.value, ast.Constant) and node.value.value is None
                if nothing or called(node.value) == "general":
                    yield file.place(node)
            elif isinstance(node, ast.Raise) and node.exc is not None and "Unsupported" in ast.unparse(node.exc):
                yield file.place(node)


def autograd_functions(files: list[File]) -> Iterator[PLACES]:
    for file in files:
        for node in file.nodes if file.name.startswith("ops/") else ():
            if isinstance(node, ast.ClassDef) and any(dotted(base).endswith("Function") for base in node.bases):
                yield file.place(node)


def number(node: ast.AST) -> float | None:
    """The value of an expression of numbers alone."""
    parts = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    for part in ast.walk(node):
        if not isinstance(part, parts) and not (isinstance(part, ast.Constant) and type(part.value) in (int, float)):
            return None
    return eval(compile(ast.Expression(node), "", "eval"))  # type: ignore[arg-type]


ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def deciding_names(file: File) -> set[str]:
    """Names in comparisons of order, min and max, and those in what a function assigns to such a name."""
    deciding: set[str] = set()
    for holder in file.nodes:
        if not isinstance(holder, (ast.Module, ast.FunctionDef)):
            continue
        found: set[str] = set()
        assigned = []
        for node in ast.walk(holder):
            if called(node) in ("min", "max") or (isinstance(node, ast.Compare) and isinstance(node.ops[0], ORDERS)):
                found |= names_in(node)
            elif isinstance(node, (ast.Assign, ast.AugAssign)) and isinstance(holder, ast.FunctionDef):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                assigned.append((names_in(target, ast.Store), names_in(node.value)))
        before = -1
        while len(found) > before:
            before = len(found)
            found = found.union(*(given for targets, given in assigned if targets & found))
        deciding |= found
    return deciding


def names_in(node: ast.AST, use: type = ast.expr_context) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, use)}


def values_in(node: ast.AST) -> list[ast.AST]:
    """What a tuple, list or dict holds; itself of any other."""
    return node.values if isinstance(node, ast.Dict) else getattr(node, "elts", [node])  # type: ignore[return-value]


def deciding_numbers(files: list[File]) -> Iterator[PLACES]:
    """Numbers that decide by how large something is: in comparisons of order (<, <=, >, >=), from 5 on or with a
    fraction; and in capitals of a module or class, alone or in a tuple or dict, whose name goes into such a comparison,
    min or max in that file. What == alone compares are codes and formats; factors and sizes decide nothing."""
    for file in files:
        if file.name == BOUNDS or file.name.startswith(("cli/", "data/")):
            continue
        deciding = deciding_names(file)
        for holder in file.nodes:
            if isinstance(holder, (ast.Module, ast.ClassDef)):
                for node in holder.body:
                    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                        names = names_in(target)
                        parts = values_in(node.value)
                        all_numbers = bool(parts) and None not in map(number, parts)
                        if names & deciding and all(name.isupper() for name in names) and all_numbers:
                            yield file.place(node)
            elif isinstance(holder, ast.Compare) and isinstance(holder.ops[0], ORDERS):
                for part in (holder.left, *holder.comparators):
                    value = number(part)
                    if value is not None and (abs(value) >= 5 or value != int(value)):
                        yield file.place(holder)
                        break


def own_names(files: list[File]) -> set[str]:
    """Private names that gnnaccel itself gives to something, outside the files that look the frameworks' up."""
    names = set()
    for file in files:
        if file.name in FRAMEWORKS.values():
            continue
        for node in file.nodes:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
                names.add(node.attr)
            elif isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__slots__":
                names |= {part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)}
    return names


def private_names(framework: str) -> Callable[[list[File]], Iterator[PLACES]]:
    """Private names that neither gnnaccel nor Python gave, by the file they stand in; torch's wherever they begin with
    `torch`. The framework's own file, its only room, does not count."""

    def found(files: list[File]) -> Iterator[PLACES]:
        known = own_names(files) | PYTHONS
        for file in files:
            house = {"pyg_backend": "PyG", "dgl_backend": "DGL"}.get(file.name.split("/")[0], "torch")
            for node in file.nodes:
                name, whose = "", house
                if isinstance(node, ast.Attribute):
                    name = node.attr
                    whose = "torch" if dotted(node).startswith(("torch.", "forward_ad.")) else house
                elif called(node) in ("getattr", "hasattr", "setattr") and len(node.args) > 1:  # type: ignore[attr-defined]
                    given = node.args[1]  # type: ignore[attr-defined]
                    name = given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else ""
                elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                    whose = MODULES.get(node.module.split(".")[0], "")
                    parts = [*node.module.split("."), *(alias.name for alias in node.names)]
                    name = next((part for part in parts if part.startswith("_")), "")
                is_private = name.startswith("_") and not name.startswith(("__", "_gnnaccel"))
                if is_private and whose == framework and name not in known and file.name not in FRAMEWORKS.values():
                    yield file.place(node)

    return found


def counters(files: list[File]) -> Iterator[PLACES]:
    """Attributes and entries of tables that are counted up, and compared with a number of bounds.py, in one folder."""
    compared: dict[str, set[str]] = {}
    for file in files:
        names = compared.setdefault(file.name.rsplit("/", 1)[0], set())
        for node in file.nodes:
            if isinstance(node, ast.Compare) and any(dotted(part).startswith("bounds.") for part in ast.walk(node)):
                names |= {counted(part) for part in ast.walk(node)}
    for file in files:
        read = compared[file.name.rsplit("/", 1)[0]] - {""}
        for node in file.nodes:
            if isinstance(node, ast.AugAssign) and ast.unparse(node).endswith(" += 1") and counted(node.target) in read:
                yield file.place(node)


def counted(node: ast.AST) -> str:
    """The name of an attribute, or of what an entry is of; "" of anything else."""
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    return node.attr if isinstance(node, ast.Attribute) else ""


def mutable_values(files: list[File]) -> Iterator[PLACES]:
    """Values of modules that a function changes: declared global there, or added to."""
    changing = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "update"}
    for file in files:
        values = {
            name.id: node
            for node in file.tree.body
            if isinstance(node, (ast.Assign, ast.AnnAssign))
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            for name in ast.walk(target)
            if isinstance(name, ast.Name)
        }
        changed = set()
        for function in file.nodes:
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for node in ast.walk(function):
                    if isinstance(node, ast.Global):
                        changed |= set(node.names)
                    elif called(node) in changing and isinstance(node.func, ast.Attribute):  # type: ignore[attr-defined]
                        changed.add(dotted(node.func.value))  # type: ignore[attr-defined]
                    elif isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
                        changed.add(dotted(node.value))
        yield from (file.place(values[name]) for name in sorted(changed & set(values)))


def code_readers(files: list[File]) -> Iterator[PLACES]:
    for file in files:
        for node in file.nodes:
            if isinstance(node, ast.Import) and any(alias.name == "dis" for alias in node.names):
                yield file.place(node)


# What is counted -> its places, whether files are counted in their stead, the goal.
MEASURES: dict[str, tuple[Callable[[list[File]], Iterator[PLACES]], bool, int]] = {
    "lines of Python": (lines, False, 38000),
    "files that name GATConv": (naming_gatconv, True, 4),
    "places that decline": (declining, False, 150),
    "autograd Functions in ops": (autograd_functions, False, 12),
    "deciding numbers outside bounds": (deciding_numbers, False, 0),
    **{f"other files, private names of {name}": (private_names(name), True, 0) for name in FRAMEWORKS},
    "counters that decide": (counters, False, 1),
    "mutable values of modules": (mutable_values, False, 20),
    "readers of bytecode": (code_readers, True, 1),
}


def measure(files: list[File]) -> dict[str, int]:
    return {
        name: len({place[0] for place in find(files)} if by_file else list(find(files)))
        for name, (find, by_file, _) in MEASURES.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--list", metavar="WHAT", choices=list(MEASURES), help="name the places behind a measure")
    parser.add_argument("--write", action="store_true", help=f"keep today's figures in {FIGURES.name}")
    options = parser.parse_args()
    files = [File(path) for path in sorted(ROOT.rglob("*.py"))]
    if options.list:
        for name, line, text in MEASURES[options.list][0](files):
            print(f"{name}:{line}: {text}")
        return
    now = measure(files)
    before = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    print(f"{'':36} {'committed':>10} {'now':>10} {'change':>10} {'goal':>10}")
    for name, (_, _, goal) in MEASURES.items():
        change = now[name] - before.get(name, now[name])
        print(f"{name:36} {before.get(name, '-'):>10} {now[name]:>10} {f'{change:+}' if change else '':>10} {goal:>10}")
    if options.write:
        FIGURES.write_text(json.dumps(now, indent=2) + "\n")


if __name__ == "__main__":
    main()
