"""Tables of benchmarks/grid.py: joined, their worst cells, and what a new one has slower."""

from pathlib import Path

import pytest

H200, H100 = "# NVIDIA H200, driver 1, torch 2.11, commit a", "# NVIDIA H100, driver 1, torch 2.11, commit a"
BEFORE = {
    ("cora", "spmm", "16"): (0.01, 0.01, 0.02),
    ("cora", "max", "16"): (0.02, "", 0.06),
    ("dd", "spmm", "16"): (1, 1, 3),
}


@pytest.fixture
def grid_table(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    return __import__("grid_table")


def a_table(grid_table, path, head, times) -> Path:
    cells = {}
    for (graph, op, width), (given, prepared, best) in times.items():
        row = dict.fromkeys(grid_table.COLUMNS, "") | {"graph": graph, "op": op, "width": width}
        row |= {
            "given_ms": str(given),
            "prepared_ms": str(prepared),
            "best_ms": str(best),
            "vs_best": str(best / given),
        }
        cells[graph, op, width] = row | {"prepared_vs_given": str(given / prepared) if prepared else ""}
    grid_table.write(path, [head, "# more"], cells)
    return path


# Times of the cells measured again -> what is named, in its order
AGAIN = {
    "as before": (BEFORE, []),
    "quicker": ({("dd", "spmm", "16"): (0.5, 0.5, 3)}, []),
    "within the bound": ({("dd", "spmm", "16"): (1.02, 1.03, 3)}, []),
    "less than events tell": ({("cora", "spmm", "16"): (0.0104, 0.0104, 3)}, []),
    "one slower": ({("dd", "spmm", "16"): (1.1, 1, 3)}, ["1.10x dd spmm 16 given_ms"]),
    "worst first": (
        {("dd", "spmm", "16"): (1.1, 1.2, 3), ("cora", "max", "16"): (0.06, "", 3), ("new", "max", "1"): (9, 9, 9)},
        ["3.00x cora max 16 given_ms", "1.20x dd spmm 16 prepared_ms", "1.10x dd spmm 16 given_ms"],
    ),
}


@pytest.mark.parametrize("name", AGAIN)
def test_what_got_slower_is_named(name, grid_table, tmp_path, capsys):
    times, want = AGAIN[name]
    old = a_table(grid_table, tmp_path / "old.csv", H200, BEFORE)
    lines = grid_table.compare(old, a_table(grid_table, tmp_path / "new.csv", H200, times))
    assert [line.partition(":")[0].strip() for line in lines] == want
    assert f"{len(want)} of" in capsys.readouterr().out


@pytest.mark.parametrize("head,times", [(H100, BEFORE), (H200, {("other", "spmm", "1"): (1, 1, 1)})])
def test_what_cannot_be_compared_is_refused(head, times, grid_table, tmp_path):
    old = a_table(grid_table, tmp_path / "old.csv", H200, BEFORE)
    with pytest.raises(ValueError, match="expected cells of NVIDIA H200"):
        grid_table.compare(old, a_table(grid_table, tmp_path / "new.csv", head, times))


def test_the_committed_table_of_the_same_gpu(grid_table, tmp_path, monkeypatch):
    monkeypatch.setattr(grid_table, "RESULTS", tmp_path)
    tables = {head: a_table(grid_table, tmp_path / f"grid_{name}.csv", head, BEFORE)
              for name, head in (("h100", H100), ("h200", H200))}  # fmt: skip
    for head, table in tables.items():
        assert grid_table.committed(a_table(grid_table, tmp_path / "new.csv", head, BEFORE)) == table
    other = a_table(grid_table, tmp_path / "new.csv", "# NVIDIA L4, driver 1", BEFORE)
    with pytest.raises(ValueError, match="no table of NVIDIA L4, but of NVIDIA H100, NVIDIA H200"):
        grid_table.committed(other)


def test_tables_are_joined(grid_table, tmp_path):
    first = a_table(grid_table, tmp_path / "1.csv", H200, BEFORE)
    second = a_table(grid_table, tmp_path / "2.csv", H200 + "1", {("dd", "spmm", "16"): (2, 2, 3)})
    head, cells = grid_table.join([first, second])
    assert head == [H200, "# more", H200 + "1"] and set(cells) == set(BEFORE)
    assert cells["dd", "spmm", "16"]["given_ms"] == "2" and cells["cora", "spmm", "16"]["given_ms"] == "0.01"
    with pytest.raises(ValueError, match="expected a table of NVIDIA H200"):
        grid_table.join([first, a_table(grid_table, tmp_path / "3.csv", H100, BEFORE)])


def test_the_worst_cells_are_named(grid_table, tmp_path):
    times = BEFORE | {("cora", "sddmm", "1"): (2, 1, 1)}
    cells = grid_table.read(a_table(grid_table, tmp_path / "1.csv", H200, times))[1]
    lines = grid_table.worst(cells, ("spmm", "sddmm"), count=1)
    assert [" ".join(line.split()) for line in lines] == [
        "spmm 2.45x of the best peer in 2 cells, slower in 0",
        "sddmm 0.50x of the best peer in 1 cells, slower in 1",
        "least beside peers, of 4 cells:",
        "0.50x cora sddmm 1",
        "least by an order, of 3 cells:",
        "1.00x cora spmm 16",
    ]


def test_a_run_goes_on_where_the_last_one_ended(grid_table, tmp_path, monkeypatch, capsys):
    grid = __import__("grid")
    path = tmp_path / "grid.csv"
    command = ["grid.py", "--graphs", "mesh-like", "knowledge-like", "--scale", "0.001", "--widths", "1", "8"]
    command += ["--ops", "spmm", "max", "softmax", "--csv", str(path)]
    monkeypatch.setattr("sys.argv", [*command, "--seconds", "0"])
    assert grid.main() == 0 and "12 cells are left: mesh-like knowledge-like" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*command, "--graphs", "mesh-like"])
    assert grid.main() == 0
    first = grid_table.read(path)[1]
    monkeypatch.setattr("sys.argv", command)
    assert grid.main() == 0
    cells = grid_table.read(path)[1]
    assert len(first) == 6 and len(cells) == 12 and first.items() <= cells.items()
    assert all(float(row["rel_error"]) < 1e-5 for row in cells.values())
