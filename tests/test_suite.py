"""`gnnaccel compare --suite`: its report, its tables, what it refuses, and the comparison with an earlier one."""

import csv
import dataclasses
import json
import re
import shutil
import subprocess
import types
from html import unescape
from html.parser import HTMLParser
from importlib import util

import numpy as np
import pytest
from command_line import arrays, command

from gnnaccel.cli import baseline, children, compare, html, main, output, request, results, suite

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """The text of a page by element and its ids; fails where elements are not closed as they were opened."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.text, self.urls = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [value for key, value in attrs if key == "id"]
        self.urls += [value for key, value in attrs if key in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open[-3:], self.getpos())
        self.open.pop()

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a suite of both frameworks on a small graph, and what was printed."""
    if not all(util.find_spec(package) for package in ("dgl", "torch_geometric")):
        pytest.skip("needs DGL and PyG")
    folder = tmp_path_factory.mktemp("suite")
    np.savez(folder / "tiny.npz", **arrays())
    words = ["--model=gcn", "--dataset=tiny.npz", "--epochs=3", "--repeats=1", "--threads=1", "--suite"]
    done = command("compare", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    (where,) = (folder / "runs").iterdir()
    return where, done.stdout


def test_a_suite_saves_a_report_tables_and_each_comparison(saved):
    where, printed = saved
    names = {"report.html", "results.json", "results.csv", "overview.png", "dgl-gcn-tiny", "pyg-gcn-tiny"}
    assert {path.name for path in where.iterdir()} == names
    assert {path.name for path in (where / "pyg-gcn-tiny").iterdir()} == {
        "results.csv", "epochs.csv", "curves.png", "run.json"
    }  # fmt: skip
    assert (where / "overview.png").read_bytes().startswith(b"\x89PNG")
    assert "DGL gcn on tiny" in printed and "PyG gcn on tiny" in printed and "100%" in printed and "\x1b" not in printed
    with open(where / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["framework"], row["side"]) for row in rows] == [
        (framework, side) for framework in ("dgl", "pyg") for side in ("alone", "gnnaccel")
    ]
    found = json.loads((where / "results.json").read_text())
    case = found["cases"][1]
    assert float(rows[3]["epoch_time_median"]) == case["sides"]["gnnaccel"]["epoch_time_median"]
    assert float(rows[3]["speedup"]) == case["speedup"]["gnnaccel"]
    assert case["dataset"]["num_edges"] == 160 and len(case["runs"][0]["loss"]) == 3


def test_the_report_of_a_suite_is_one_sound_page(saved):
    text = (saved[0] / "report.html").read_text()
    page = Page(text)
    assert page.tags.count("svg") == 3 + 2  # times, memory, shares; the curves of each comparison
    assert {"all", "environment"} < set(page.ids) and "script" not in page.tags
    assert all(url.startswith("#") for url in page.urls)
    words = " ".join(page.text)
    assert "training loss" in words and "No call was left to the framework." in words and "torch_geometric" in words


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
# What a browser makes of the page: what it fetched, how far it is wider than its window, what its charts cut off.
LAID_OUT = """<script>
const cut = [...document.querySelectorAll("svg text")].filter(text => {
  const own = text.getBoundingClientRect(), chart = text.closest("svg").getBoundingClientRect();
  const beside = own.left < chart.left - 1 || own.right > chart.right + 1;
  return beside || own.top < chart.top - 1 || own.bottom > chart.bottom + 1;
}).map(text => text.textContent);
const charts = [...document.querySelectorAll("svg")].filter(chart => chart.getBoundingClientRect().height > 50).length;
const root = document.documentElement, fetched = performance.getEntriesByType("resource").length;
root.setAttribute("data-found", JSON.stringify({fetched, wider: root.scrollWidth - root.clientWidth, charts, cut}));
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_shows_the_report_whole(saved, width, tmp_path):
    page = tmp_path / "report.html"
    page.write_text((saved[0] / "report.html").read_text().replace("</body>", f"{LAID_OUT}</body>"))
    alone = (
        "disable-gpu",
        "no-sandbox",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
    )
    words = [BROWSER, "--headless", *(f"--{word}" for word in alone), f"--user-data-dir={tmp_path / 'profile'}"]
    words += [f"--window-size={width},900", "--dump-dom", page.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    (found,) = re.findall(r'data-found="([^"]*)"', done.stdout)
    assert json.loads(unescape(found)) == {"fetched": 0, "wider": 0, "charts": 5, "cut": []}


# of invented figures


def a_case(framework="pyg", model="gcn", times=(10.0, 5.0), scatter=0.05, memory=(8.0, 4.0), left=(), **options):
    sides = {
        side: {
            "epoch_time_median": time, "epoch_time_q1": time * (1 - scatter), "epoch_time_q3": time * (1 + scatter),
            "peak_memory": held, "test_accuracy": 0.5, "final_loss": 1.0,
        }
        for side, time, held in zip(("alone", "gnnaccel"), times, memory, strict=True)
    }  # fmt: skip
    sides["gnnaccel"] |= {"share_accelerated": 0.75, "max_loss_difference": 1e-7, "calls_left": 2.0}
    runs = [
        {"side": s, "pair": 1, "epoch_time_ms": [t] * 4, "loss": [1.0] * 4} for s, t in zip(sides, times, strict=True)
    ]
    return {
        "framework": framework, "model": model, "device": "cpu", "error": "", "title": f"{framework} {model} on <x>",
        "dataset": {"name": "<x>", "num_nodes": 40, "num_edges": 160, "num_features": 8, "num_classes": 3},
        "options": dict.fromkeys(baseline.OPTIONS, 1) | options,
        "names": {"alone": "alone", "gnnaccel": "with gnnaccel"}, "warmup_epochs": 2, "sides": sides,
        "speedup": {"gnnaccel": times[0] / times[1]}, "memory_ratio": {"gnnaccel": memory[0] / memory[1]},
        "left": list(left), "warnings": ["it <scatters>"], "notes": ["a note"], "runs": runs,
    }  # fmt: skip


FAILED = {
    "framework": "dgl", "model": "gat", "device": "cpu", "error": "it ended by SIGKILL\n\n<why>",
    "dataset": {"name": "<x>"}, "options": dict.fromkeys(baseline.OPTIONS, 1),
}  # fmt: skip


def a_suite(*cases, **where):
    versions = {"gnnaccel": "0.1.0", "torch": "2.13.0"}
    known = {"format": 1, "command": "gnnaccel compare", "date": "today", "interrupted": False, "versions": versions}
    known |= {"cpu": "a CPU", "cores": 2, "gpu": None, "threads": 2, "options": {"epochs": 4}, "cases": list(cases)}
    return known | where


def test_the_report_names_what_was_left_what_failed_and_what_it_is_told_from_elsewhere():
    left = {"side": "gnnaccel", "kind": "pyg.X", "reason": "<b>hooks</b>", "calls": 2}
    found = a_suite(a_case(left=[left]), FAILED)
    text = html.render(found, baseline.compare(a_suite(a_case(times=(10.0, 2.0))), found))
    words = " ".join(Page(text).text)
    assert "<b>hooks</b>" in words and "it <scatters>" in words and "SIGKILL" in words and "75.0 %" in words
    assert "MORE: pyg gcn on <x>, cpu, gnnaccel: epoch time 2 then, 5 ms now (2.50x)" in words


def test_a_warning_of_many_comparisons_is_printed_once(capsys):
    def warned(*cases):
        suite.show(a_suite(*cases), None)
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]

    pyg, dgl = a_case(), a_case("dgl")
    assert warned(pyg) == ["WARNING: PyG gcn on <x>: it <scatters>"]
    assert warned(pyg, dgl) == ["WARNING: all: it <scatters>"]
    ended = "WARNING: DGL gat on <x>: it ended by SIGKILL"
    assert warned(pyg, dgl, FAILED) == ["WARNING: PyG gcn on <x>, DGL gcn on <x>: it <scatters>", ended]


def test_a_report_where_all_failed_is_still_a_page(tmp_path, capsys):
    found = a_suite(FAILED)
    assert "SIGKILL" in " ".join(Page(html.render(found)).text)
    suite.save_csv(tmp_path / "results.csv", found)
    suite.show(found, None)
    assert "failed" in capsys.readouterr().out and "it ended by SIGKILL" in (tmp_path / "results.csv").read_text()


@pytest.mark.parametrize(
    "times, scatter, memory, worse, better",
    [
        ((10.0, 5.4), 0.0, (8.0, 4.0), [], []),  # less than a tenth
        ((10.0, 8.0), 0.3, (8.0, 4.0), [], []),  # quartiles overlap
        ((10.0, 8.0), 0.05, (8.0, 4.0), ["gnnaccel epoch time"], []),
        ((5.0, 5.0), 0.05, (8.0, 9.0), ["gnnaccel peak memory"], ["alone epoch time"]),
        ((10.0, 5.0), 0.05, (None, None), [], []),
    ],
)
def test_changes_count_where_they_are_clear_of_the_scatter(times, scatter, memory, worse, better):
    case = a_case(times=times, scatter=scatter)
    for side, held in zip(case["sides"].values(), memory, strict=True):
        side["peak_memory"] = held
    found = baseline.compare(a_suite(a_case(scatter=scatter)), a_suite(case))
    assert [f"{change.side} {change.what}" for change in found.worse] == worse
    assert [f"{change.side} {change.what}" for change in found.better] == better
    assert len(found.worse) + len(found.better) + found.same == (4 if memory[0] else 2)


def test_other_trainings_and_machines_are_said():
    old = a_suite(a_case(), a_case(model="gat"), a_case(model="gin"), cpu="another CPU")
    new = a_suite(a_case(hidden=32), a_case("dgl"), a_case(model="gin", times=(10.0, 50.0)), FAILED)
    new["versions"] = {"gnnaccel": "0.2.0", "torch": "2.13.0", "dgl": "2.1.0"}
    text = "\n".join(baseline.compare(old | {"file": "old.json"}, new).lines())
    batches = a_suite(a_case(sample=(15, 10), batch_size=64))  # earlier reports know of none
    sampled = "\n".join(baseline.compare(a_suite(a_case()), batches).lines())
    assert "not compared: pyg gcn on <x>, cpu: sampled neighbours none then, 15,10 in batches of 64 now" in sampled
    assert "not compared: pyg gcn on <x>, cpu: hidden 1 then, 32 now" in text
    assert "not compared: dgl gcn on <x>, cpu: not in the earlier report" in text
    assert "not compared: pyg gat on <x>, cpu: only in the earlier report" in text
    assert "not the same: cpu: another CPU then, a CPU now" in text and "gnnaccel: 0.1.0 then, 0.2.0 now" in text
    assert "1 more, 0 less, 3 within" in text and "dgl: None" not in text and text.startswith("compared with old.json")


# what is refused, and what is kept


@pytest.mark.parametrize(
    "options, code, said",
    [
        (["--framework=pyg,tf"], 2, "'tf' in 'pyg,tf': expected dgl, pyg"),
        (["--framework=pyg", "--model=gcn,"], 2, "'' in 'gcn,': expected gcn, sage, gin, gat, agnn"),
        (["--framework=pyg", "--dataset=cora,nix"], 2, "unknown graph 'nix'"),
        (["--framework=pyg", "--dataset=cora,own/cora.npz"], 2, "'cora' and 'own/cora.npz' are both called cora"),
        (["--framework=pyg", "--model=gcn,gat", "--maxk=4"], 2, "gat has no ReLU"),
        (["--framework=pyg", "--baseline=nix.json"], 2, "'nix.json': No such file"),
        (["--framework=pyg", "--baseline=text.json"], 2, "'text.json' is no JSON"),
        (["--framework=pyg", "--baseline=run.json"], 2, "expected a results.json that gnnaccel compare --suite"),
        (["--framework=pyg", "--baseline=next.json"], 2, "expected format 1, got 2"),
        ([], 2, "expected dgl or pyg"),
    ],
)
def test_a_suite_refuses_what_it_cannot_compare_before_it_trains(options, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(request, "util", types.SimpleNamespace(find_spec=lambda name: name))
    (tmp_path / "own").mkdir()
    np.savez(tmp_path / "own" / "cora.npz", **arrays())
    for name, text in (("text", "no"), ("run", '{"format": 1}'), ("next", '{"format": 2}')):
        (tmp_path / f"{name}.json").write_text(text)
    assert main(["compare", *options]) == code
    assert said in " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().err).split())
    assert not (tmp_path / "runs").exists()


def trained(request, work, graph):
    """A comparison without training."""
    sites = {"pyg.X": {"accelerated": 6, "left": 0, "reasons": {}}}
    runs = [
        results.Run(side, 0, {"epoch_time_ms": [time] * 4, "loss": [1.0] * 4, "extra_memory_bytes": 2**20,
                              "test_accuracy": 0.5}, {"sites": sites})
        for side, time in (("alone", 2.0), ("gnnaccel", 1.0))
    ]  # fmt: skip
    about = {"dataset": a_case()["dataset"] | {"name": graph.name}, "versions": {}, "gpu": None, "threads": 1}
    names = {"alone": "alone", "gnnaccel": "with gnnaccel"}
    return compare.Comparison(request, "title", names, runs, results.evaluate(runs, 1.0, 1e-4), [], about)


@pytest.mark.parametrize(
    "stop, code, said",
    [
        (children.Failed("out of memory"), 1, "out of memory"),
        (OSError("disk full"), 1, "OSError: disk full"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_was_compared_before_a_failure_or_an_interruption_is_saved(
    stop, code, said, tmp_path, monkeypatch, capsys
):
    def measure(request, work, graph):
        if request.model == "gat":
            raise stop
        return trained(request, work, graph)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(request, "util", types.SimpleNamespace(find_spec=lambda name: name))
    assert main(["compare", "--framework=pyg", "--model=gcn,gat,gin", "--dataset=cora"]) == code
    assert said in capsys.readouterr().err
    (where,) = (tmp_path / "runs").iterdir()
    found = json.loads((where / "results.json").read_text())
    kinds = [(case["model"], bool(case["error"])) for case in found["cases"]]
    assert kinds == ([("gcn", False), ("gat", True), ("gin", False)] if code == 1 else [("gcn", False)])
    assert found["interrupted"] == (code == 130) and (where / "pyg-gcn-cora" / "results.csv").is_file()


def test_a_suite_in_which_all_fails_says_why(tmp_path, monkeypatch, capsys):
    def measure(request, work, graph):
        raise children.Failed("out of memory")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(request, "util", types.SimpleNamespace(find_spec=lambda name: name))
    assert main(["compare", "--framework=pyg", "--model=gcn,gat", "--dataset=cora"]) == 1
    (where,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in where.iterdir()} == {"report.html", "results.json", "results.csv"}
    assert "WARNING: all: out of memory" in capsys.readouterr().out


def test_losses_that_are_not_finite_are_null_in_json(tmp_path, monkeypatch):
    def measure(request, work, graph):
        done = trained(request, work, graph)
        done.runs[1].measured["loss"] = [1.0, float("nan"), float("inf"), 1.0]
        return dataclasses.replace(done, results=results.evaluate(done.runs, 1.0, 1e-4))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(request, "util", types.SimpleNamespace(find_spec=lambda name: name))
    assert main(["compare", "--framework=pyg", "--suite", "--model=gcn", "--dataset=cora"]) == 0
    (where,) = (tmp_path / "runs").iterdir()
    (case,) = json.loads((where / "results.json").read_text(), parse_constant=pytest.fail)["cases"]
    assert case["runs"][1]["loss"] == [1.0, None, None, 1.0] and "not finite" in case["warnings"][0]
    assert "not finite" in " ".join(Page((where / "report.html").read_text()).text)


def test_nothing_is_saved_of_a_suite_that_is_interrupted_at_once(tmp_path, monkeypatch, capsys):
    def measure(request, work, graph):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(request, "util", types.SimpleNamespace(find_spec=lambda name: name))
    assert main(["compare", "--framework=pyg", "--model=gcn,gat"]) == 130
    assert "nothing was saved" in capsys.readouterr().err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "value, unit, shown",
    [(None, "ms", ""), (21950.4, "ms", "21950"), (9.5671, "ms", "9.567"), (3.0, "", "3"), (8.04, "MiB", "8.0"),
     (float("inf"), "", "inf"), (1.19e-7, "", "1.19e-07")],
)  # fmt: skip
def test_numbers_are_short_and_never_powers_of_ten_in_milliseconds(value, unit, shown):
    assert output.number(value, unit) == shown


def test_every_side_has_a_colour():
    assert set(output.COLOURS) == set(results.SIDES)
