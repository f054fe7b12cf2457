"""gnnaccel/lower/bounds.py: each number has a name, a unit and an origin, and the page of them is up to date."""

from pathlib import Path

from gnnaccel.lower import bounds

ROOT = Path(__file__).resolve().parent.parent
ORIGINS = (bounds.MEASURED, bounds.REASONED, bounds.BUILT)


def test_rows_say_where_a_number_is_from():
    rows = bounds.rows()
    text = Path(bounds.__file__).read_text("utf-8")
    assert len({row.name for row in rows}) == len(rows) == text.count(" = bound(")
    for row in rows:
        assert row.unit and row.device and row.decides and row.section, row
        for table in () if row.table in ORIGINS else row.table.split(", "):
            assert (ROOT / "benchmarks" / "results" / table).is_file(), row


def test_every_number_is_used_and_listed():
    text = "".join(path.read_text("utf-8") for path in ROOT.glob("gnnaccel/**/*.py"))
    names = {name for name in vars(bounds) if name.isupper()} - {"T", "MEASURED", "REASONED", "BUILT", "INT32_MAX"}
    assert names == {row.name for row in bounds.rows()}
    assert not [name for name in names if f"bounds.{name}" not in text]


def test_page_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import bounds_page

    assert bounds_page.page() == bounds_page.PAGE.read_text(encoding="utf-8"), "run scripts/bounds_page.py"
