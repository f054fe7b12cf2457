"""Writes docs/bounds.md: the numbers of gnnaccel/lower/bounds.py.

python scripts/bounds_page.py
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "bounds.md"

_HEAD = """# Bounds

Written by `python scripts/bounds_page.py`: every number in `gnnaccel/lower/bounds.py`. They decide which way a call, a
graph or a model goes, and how much is done at a time. "On": what it was measured on, or is for. "From": its table, or
whether it was measured at all. Comments beside the numbers have what is in no table.
"""


def page() -> str:
    """The text of docs/bounds.md."""
    sys.path.insert(0, str(ROOT))
    from gnnaccel.lower import bounds

    parts = [_HEAD]
    for section, rows in itertools.groupby(bounds.rows(), lambda row: row.section):
        parts += [f"\n## {section}\n\n| | | | on | from |\n|---|---|---|---|---|\n"]
        for row in rows:
            value = _shown(row.value, row.unit.startswith("bytes"))
            unit = row.unit.removeprefix("bytes").lstrip() if "iB" in value else row.unit
            cells = f"`{row.name}`", f"{value} {unit}".rstrip(), row.decides, row.device, _linked(row.table)
            parts.append(f"| {' | '.join(cells)} |\n")
    return "".join(parts)


def _shown(value, is_bytes: bool) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_shown(each, is_bytes)}" for key, each in value.items())
    if isinstance(value, tuple):
        return ", ".join(_shown(each, is_bytes) for each in value)
    if is_bytes and value % (1 << 20) == 0:
        return f"{value >> 30} GiB" if value % (1 << 30) == 0 else f"{value >> 20} MiB"
    if isinstance(value, int) and value >= 1 << 16 and value.bit_count() == 1:
        return f"2^{value.bit_length() - 1}"
    return f"{value:,}"


def _linked(table: str) -> str:
    return ", ".join(
        f"[{name}](../benchmarks/results/{name})" if ".csv" in name else name for name in table.split(", ")
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
