"""docs/coverage.md says what running every layer and function shows."""

from pathlib import Path

import pytest

pytest.importorskip("dgl_compare")
pytest.importorskip("torch_geometric")

ROOT = Path(__file__).resolve().parent.parent


def test_page_is_up_to_date(monkeypatch):
    monkeypatch.undo()  # of conftest: the page says what few messages are
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import coverage_page

    layers = {name.split()[0]: how for name, how, _ in coverage_page.pyg_rows()}
    assert sum(how in ("spmm", "attention", "message", "blocks") for how in layers.values()) >= 50
    assert coverage_page.page() == coverage_page.PAGE.read_text(encoding="utf-8"), "run scripts/coverage_page.py"
