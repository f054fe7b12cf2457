"""The documentation: its examples and those of docstrings give what they say, its links lead somewhere, and its figures
of speed are those of the tables in benchmarks/results."""

import doctest
import importlib
import re
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


LINKED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
FENCED = re.compile(r"^```.*?^```|^(?: {4}|\t).*?$", re.DOTALL | re.MULTILINE)  # code, in which brackets are no links


def anchors(page):
    """What a link to a heading of a page may say, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    text = FENCED.sub("", page.read_text("utf-8"))
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    named = re.findall(
        r"(?<![\w/])((?:benchmarks|docs|gnnaccel|scripts|tests|examples|cpp|cuda)/[\w./-]+\.(?:py|csv|md|cuh|cu|cpp))",
        text,
    )
    broken += [name for name in named if not (ROOT / name).exists()]
    assert not broken


def test_figures_of_speed_are_those_of_the_tables():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        summary = importlib.import_module("summary")
    finally:
        sys.path.pop(0)
    page = summary.PAGE.read_text("utf-8")
    assert summary.filled(page) == page, "run python benchmarks/summary.py"
    with pytest.raises(ValueError, match="expected the blocks"):
        summary.filled(page.replace("cpu-small", "cpu-big"))
    chart = summary.CHART.read_text("utf-8")
    for label, alone, ours in (bar for panel in summary.bars().values() for bar in panel):
        assert (
            label in chart and f"{alone / ours:.1f}x ({summary.short(alone)} to {summary.short(ours)} ms)" in chart
        ), label


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < 120


@pytest.mark.parametrize("module", ["gnnaccel", "gnnaccel.nn", "gnnaccel.ops", "gnnaccel.sampling"])
def test_the_page_of_the_interface_has_all_public_names(module):
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    listed = {name.rpartition(".")[2] for name in re.findall(r"^::: (gnnaccel\.[\w.]+)$", page, re.MULTILINE)}
    public = importlib.import_module(module)
    functions = {name for name in public.__all__ if callable(getattr(public, name))}
    assert functions and functions - listed == set()


def test_the_menu_of_the_site_has_every_page():
    """`make docs` says so too, where its tools are installed."""
    menu = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    pages = {path.name for path in ROOT.glob("docs/*.md")} | {"index.md", "contributing.md", "changelog.md"}
    assert set(re.findall(r": ([\w-]+\.md)$", menu, re.MULTILINE)) == pages
