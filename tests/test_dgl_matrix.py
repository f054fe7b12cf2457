"""Each case of dgl_cases.CASES on each of its graphs: outputs and all gradients with the plug-in off and on."""

import importlib.util
import inspect
from pathlib import Path

import pytest
from dgl_cases import CASES, OUTSIDE
from dgl_compare import ACCELERATED, FRAMEWORK, PARTLY, assert_same, attempt, both, dgl, status

from gnnaccel import dgl_backend

pytestmark = pytest.mark.usefixtures("dgl_restored")


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    case = CASES[name]
    for where in case.graphs:
        backward = where not in case.no_backward
        want, got, counted = both(*case.bind(where), grad=backward)
        assert_same(got, want, case.tolerance, f"{name} on {where}")
        if where == case.graphs[0]:
            assert isinstance(want, dict), f"DGL alone fails: {want}"
            assert status(counted)[0] == case.expect, f"{name}: {status(counted)}"
            if case.expect == PARTLY or status(counted)[1]:
                assert status(counted)[1] == case.reason
        if not backward:
            _check_gradients(name, where)


def _check_gradients(name, where):
    """Where DGL alone has no right gradient: there is one, and without edges no feature of theirs has any."""
    case = CASES[name]
    dgl_backend.enable()
    got = attempt(*case.bind(where))
    assert isinstance(got, dict), f"{name} on {where}: {got}"
    assert all(g.isfinite().all() for n, g in got.items() if n.startswith("gradient"))
    if where == "edgeless" and case.make is None:
        assert all((g == 0).all() for n, g in got.items() if n.startswith("gradient"))


def test_every_case_has_an_expectation():
    for name, case in CASES.items():
        assert case.expect in (ACCELERATED, PARTLY, FRAMEWORK), name
        assert bool(case.reason) == (case.expect != ACCELERATED), name


def _covered() -> set[str]:
    return {name.partition("(")[0].partition(" ")[0] for name in CASES}


def test_every_module_is_covered():
    modules = {n for n, c in vars(dgl.nn.pytorch).items() if inspect.isclass(c) and c.__module__.startswith("dgl.nn")}
    assert not set(dgl.nn.pytorch.conv.__all__) - _covered()
    assert not set(dgl.nn.pytorch.glob.__all__) - _covered()
    assert modules - _covered() == set(OUTSIDE)


def test_every_op_and_function_is_covered():
    ops = {n for n, f in vars(dgl.ops).items() if inspect.isfunction(f) and not n.startswith("_")}
    assert not ops - _covered()
    messages = {n for n in vars(dgl.function) if n.startswith("copy_") or (n[1:2] == "_" and n[0] in "uve")}
    assert not messages - {n.partition("(")[2].rstrip(")") for n in CASES if n.startswith("update_all(")}
    readout = set(dgl.readout.__all__)
    assert not readout - _covered()


def test_the_rows_of_the_documentation():
    path = Path(__file__).resolve().parent.parent / "scripts" / "coverage_dgl.py"
    spec = importlib.util.spec_from_file_location("coverage_dgl", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = ["copy_e", "update_all(copy_u)", "SAGEConv('lstm')", "GATConv(residual=True)"]
    rows = module.dgl_rows(set(names))
    assert [row[1:] for row in rows[:4]] == [(n, CASES[n].expect, CASES[n].reason) for n in names]
    assert [row[1] for row in rows[4:]] == list(OUTSIDE)
