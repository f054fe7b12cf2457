"""`gnnaccel compare`: what it saves and says, the graphs it can train on, and its figures."""

import csv
import json
import math
import re
import sys
import types
from importlib import util

import forked
import numpy as np
import pytest
from command_line import TORCH, arrays, command, table

from gnnaccel import data
from gnnaccel.cli import children, compare, datasets, main, output, request, results
from gnnaccel.cli.train import export

COMPARED = [("dgl", "gcn"), ("pyg", "gat")]
SIDES = ("alone", "gnnaccel")
PACKAGES = {"dgl": "dgl", "pyg": "torch_geometric"}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    path = tmp_path_factory.mktemp("graph") / "tiny.npz"
    np.savez(path, **arrays())
    return path


@pytest.fixture(scope="module", params=COMPARED, ids=lambda pair: "-".join(pair))
def compared(request, graph, tmp_path_factory):
    """A comparison that was run: its folder and what was printed."""
    framework, model = request.param
    if util.find_spec(PACKAGES[framework]) is None:
        pytest.skip(f"{framework} is not installed")
    folder = tmp_path_factory.mktemp("compared")
    options = {"dataset": graph, "epochs": 3, "repeats": 1, "out": folder / "runs", "threads": 1, "heads": 2}
    words = [f"--{key}={value}" for key, value in options.items()]
    done = command("compare", "--framework", framework, "--model", model, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    (where,) = (folder / "runs").iterdir()
    return where, done.stdout


def test_compare_saves_consistent_results(compared):
    where, _ = compared
    assert {path.name for path in where.iterdir()} == {"results.csv", "epochs.csv", "curves.png", "run.json"}
    assert (where / "curves.png").read_bytes().startswith(b"\x89PNG")
    rows = table(where)
    with open(where / "epochs.csv", newline="") as file:
        epochs = list(csv.DictReader(file))
    assert [(row["side"], row["epoch"], row["warmup"]) for row in epochs] == [
        (side, str(epoch), str(int(epoch == 1))) for side in ("alone", "gnnaccel") for epoch in (1, 2, 3)
    ]
    median = {
        side: np.median([float(row["time_ms"]) for row in epochs if row["side"] == side and row["warmup"] == "0"])
        for side in ("alone", "gnnaccel")
    }
    time = rows["epoch_time_median"]
    assert float(time["alone"]) == pytest.approx(median["alone"])
    assert float(time["gnnaccel"]) == pytest.approx(median["gnnaccel"])
    assert float(time["ratio"]) == pytest.approx(median["alone"] / median["gnnaccel"])
    losses = [[float(row["loss"]) for row in epochs if row["side"] == side] for side in ("alone", "gnnaccel")]
    assert float(rows["max_loss_difference"]["gnnaccel"]) == pytest.approx(np.abs(np.subtract(*losses)).max())
    assert float(rows["max_loss_difference"]["gnnaccel"]) < 1e-4


def test_compare_accelerates_every_call(compared):
    rows = table(compared[0])
    assert float(rows["share_accelerated"]["gnnaccel"]) == 1.0
    assert float(rows["calls_accelerated"]["gnnaccel"]) > 0 and float(rows["calls_left"]["gnnaccel"]) == 0
    assert "left_to_framework" not in rows
    assert float(rows["prepare_time"]["gnnaccel"]) > 0
    assert rows["test_accuracy"]["alone"] == rows["test_accuracy"]["gnnaccel"]


def test_compare_says_where_the_figures_come_from(compared):
    where, _ = compared
    about = json.loads((where / "run.json").read_text())
    assert about["threads"] == 1 and about["cpu"] and about["gpu"] is None
    assert about["versions"]["gnnaccel"] and about["versions"]["torch"]
    assert about["dataset"] | {"name": "tiny", "num_nodes": 40, "num_edges": 160} == about["dataset"]
    assert about["command"].startswith("gnnaccel compare --framework")
    assert about["calls"] and about["warmup_epochs"] == 1


def test_compare_prints_a_plain_table_in_a_pipe(compared):
    _, printed = compared
    assert "\x1b" not in printed and "\r" not in printed
    assert "epoch time, median [ms]" in printed and "100.0%" in printed
    assert "the first epoch of each run is warm-up" in printed


def test_compare_has_a_compiled_side_of_each(graph, tmp_path, monkeypatch, capsys):
    if util.find_spec("torch_geometric") is None or request.shutil.which("g++") is None:
        pytest.skip("needs PyG and a C++ compiler")
    words = ["--framework=pyg", f"--dataset={graph}", "--epochs=4", "--repeats=1", "--threads=1"]
    words += ["--dropout=0", "--layers=1"]
    # No pool of processes for three kernels, and no attempt of torch's at each instruction set.
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    assert main(["compare", *words, "--compile", f"--out={tmp_path / 'runs'}"]) == 0
    (where,) = (tmp_path / "runs").iterdir()
    rows = table(where)
    assert list(rows["compile_time"]) == [
        "figure", "unit", *results.SIDES[:4], "ratio_alone_compiled", "ratio", "ratio_gnnaccel_compiled", "text"
    ]  # fmt: skip
    assert rows["compile_time"]["alone"] == rows["compile_time"]["gnnaccel"] == ""
    compile_ms = [float(rows["compile_time"][side]) for side in ("alone_compiled", "gnnaccel_compiled")]
    assert min(compile_ms) > 10 * float(rows["epoch_time_median"]["gnnaccel_compiled"])  # and in no epoch:
    assert max(float(rows["first_epoch_surplus"][side]) for side in results.SIDES[:4]) < min(compile_ms)
    gaps = rows["max_loss_difference"]
    assert max(float(gaps[side]) for side in results.SIDES[1:4]) < 1e-4
    assert (
        float(rows["share_accelerated"]["gnnaccel_compiled"]) == 1 and rows["share_accelerated"]["alone_compiled"] == ""
    )
    about = json.loads((where / "run.json").read_text())
    assert set(about["calls"]) == {"gnnaccel", "gnnaccel_compiled"} and set(about["pair_speedups"]) == set(
        results.SIDES[1:4]
    )
    shown = capsys.readouterr().out
    assert "PyG alone, compiled" in shown and "torch.compile, before the epochs [ms]" in shown


def run_forked(words, env, what, on_line):
    """children.run(), of programs that end well, without the seconds of their imports."""
    done = forked.run(words, env)
    assert done.returncode == 0, f"{what}: {done.stderr}"
    for line in done.stdout.splitlines():
        on_line(line)
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("framework", "model"), [("pyg", "sage"), ("pyg", "agnn"), ("dgl", "gcn"), ("dgl", "gat"), ("dgl", "agnn")]
)
def test_compare_on_sampled_batches(framework, model, graph, tmp_path, monkeypatch):
    if util.find_spec(PACKAGES[framework]) is None:
        pytest.skip(f"{framework} is not installed")
    words = [f"--framework={framework}", f"--model={model}", f"--dataset={graph}", "--epochs=3", "--repeats=1"]
    words += ["--sample=3,-1,2", "--batch-size=5", "--threads=1", "--hidden=4", f"--out={tmp_path / 'runs'}"]
    monkeypatch.setattr(children, "run", run_forked)
    assert main(["compare", *words]) == 0
    (where,) = (tmp_path / "runs").iterdir()
    about, rows = json.loads((where / "run.json").read_text()), table(where)
    sites = about["calls"]["gnnaccel"]
    with np.load(graph) as file:
        batches = -(-int(file["train_mask"].sum()) // 5)
    sampled = next(site for kind, site in sites.items() if "NeighborSampler" in kind)
    assert sampled["accelerated"] == 3 * batches and about["options"]["layers"] == 3
    others = [said for said in about["warnings"][1:] if "busy machine" not in said]  # the first: few epochs
    assert float(rows["share_accelerated"]["gnnaccel"]) == 1 and not others
    ours = framework == "pyg" and not (util.find_spec("pyg_lib") or util.find_spec("torch_sparse"))
    assert any("gnnaccel's sampler" in note for note in about["notes"]) == ours
    if ours:  # the same batches
        assert float(rows["max_loss_difference"]["gnnaccel"]) < 1e-4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sample=3,x"], "expected numbers from 1"),
        (["--sample=3,0"], "expected numbers from 1"),
        (["--sample=3,-2"], "expected numbers from 1"),
        (["--sample=3,3", "--layers=3"], "for each of 3 layers, got 2"),
        (["--sample=3,3", "--compile"], "leave out --compile"),
        (["--sample=3,3", "--batch-size=0"], "--batch-size"),
    ],
)
def test_compare_refuses_batches(options, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "--framework=pyg", *options]) == 2
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    "options, code, said",
    [
        (["--cuda-graphs"], 2, "captured on a GPU alone; add --device cuda"),
        (["--cuda-graphs", "--device=cuda", "--epochs=7"], 2, "--epochs of at least 8"),
        (["--cuda-graphs", "--device=cuda"], 1, "this torch was built without CUDA"),
        (["--compile"], 1, "there is no no-such-compiler"),
    ],
)
def test_compare_refuses_sides_that_cannot_run(options, code, said, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(children, "ask", lambda question: TORCH)
    monkeypatch.setattr(request, "util", types.SimpleNamespace(find_spec=lambda name: name))
    assert main(["compare", "--framework=pyg", *options]) == code
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options, code, said",
    [
        (["--dataset=nix"], 2, "unknown graph 'nix': expected cora, citeseer, pubmed.*GNNACCEL_DATA"),
        (["--dataset=nix.npz"], 2, "no file 'nix.npz': expected cora"),
        (["--dataset={tmp}/wrong.npz"], 2, "edge_index"),
        (["--out={tmp}/wrong.npz"], 2, "--out"),
    ],
)
def test_compare_refuses_what_it_cannot_train_on(options, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GNNACCEL_DATA", raising=False)
    np.savez(tmp_path / "wrong.npz", **{**arrays(), "edge_index": np.zeros((3, 4), int)})
    given = [option.format(tmp=tmp_path) for option in options]
    assert main(["compare", "--framework=pyg", *given]) == code
    assert re.search(said, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.npz"]


@pytest.mark.parametrize(
    "framework, answers, said",
    [
        ("pyg", {"torch": TORCH}, "this torch was built without CUDA"),
        ("pyg", {"torch": TORCH | {"cuda": "13.0"}}, "torch sees no GPU"),
        ("pyg", {"torch": TORCH | {"cuda": "13.0", "gpus": ["H200"]}}, "built without its CUDA half"),
        ("pyg", {"torch": {"error": "ImportError: no torch"}}, "no torch"),
    ],
)
def test_compare_refuses_cuda_where_it_cannot_run(framework, answers, said, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(children, "ask", lambda question: answers[question])
    monkeypatch.setattr(request, "util", types.SimpleNamespace(find_spec=lambda name: name))
    assert main(["compare", "--framework", framework, "--device", "cuda"]) == 1
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_compare_refuses_a_framework_that_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(request, "util", types.SimpleNamespace(find_spec=lambda name: None))
    assert main(["compare", "--framework", "dgl"]) == 1
    assert re.search("DGL is not installed: .*pip install dgl==", capsys.readouterr().err)


@pytest.mark.parametrize(
    "program, said",
    [
        (
            "import sys; print('the reason', file=sys.stderr); sys.exit(7)",
            r"(?s)alone ended with exit code 7.*the reason",
        ),
        ("import os; os.kill(os.getpid(), 9)", r"alone ended by SIGKILL \(out of memory\?\)"),
        ("pass", "left no result"),
    ],
)
def test_compare_shows_why_a_run_failed_and_saves_nothing(program, said, graph, tmp_path, monkeypatch, capsys):
    trainer = tmp_path / "trainer.py"
    trainer.write_text(program)
    monkeypatch.setattr(compare, "_TRAINER", trainer)
    monkeypatch.setattr(request, "util", types.SimpleNamespace(find_spec=lambda name: name))
    out = tmp_path / "runs"
    assert main(["compare", "--framework=pyg", f"--dataset={graph}", f"--out={out}"]) == 1
    assert re.search(said, capsys.readouterr().err)
    assert not out.exists()


def test_results_get_folders_of_their_own(tmp_path):
    for _ in range(2):
        with compare.new_folder(tmp_path) as folder:
            (folder("") / "file").touch()
            folder("same")
    assert {path.name for path in tmp_path.iterdir()} == {"same", "same-2"}


# graphs that loaders of the frameworks fetch


def test_graphs_of_a_loader_that_fails_are_explained(monkeypatch, tmp_path):
    def fail(*args):
        raise children.Failed("a long story", last_line="URLError: no network")

    monkeypatch.setattr(children, "run", fail)
    with pytest.raises(children.Failed, match=r"amazon_photo could not be fetched.*no network.*Expected cora") as error:
        datasets.load("Amazon-Photo", "pyg", tmp_path)
    assert error.value.code == 1


def test_graphs_of_a_loader_get_a_split_where_they_have_none(monkeypatch, tmp_path):
    whole = arrays()

    class Amazon:
        def __init__(self, folder, name):
            assert name == "Photo"

        def __getitem__(self, index):
            return {key: types.SimpleNamespace(numpy=lambda key=key: whole[key]) for key in ("edge_index", "x", "y")}

    def run(words, env, what):
        monkeypatch.setattr(sys, "argv", words[words.index(str(datasets._EXPORT)) :])
        export.main()
        return "split at random\n", ""

    monkeypatch.setitem(sys.modules, "torch_geometric", types.ModuleType("torch_geometric"))
    loaders = types.ModuleType("torch_geometric.datasets")
    loaders.Amazon = Amazon
    sys.modules["torch_geometric"].datasets = loaders
    monkeypatch.setitem(sys.modules, "torch_geometric.datasets", loaders)
    monkeypatch.setattr(children, "run", run)
    found = datasets.load("amazon_photo", "pyg", tmp_path)
    assert found.name == "amazon_photo" and any("60 %" in note for note in found.notes)
    assert [int(mask.sum()) for mask in (found.train_mask, found.val_mask, found.test_mask)] == [24, 8, 8]


def test_loaders_exist_in_the_frameworks():
    pyg = pytest.importorskip("torch_geometric.datasets")
    assert all(hasattr(pyg, kind[0]) for _, kind in export.LOADERS.values())
    if util.find_spec("dgl") is None:
        pytest.skip("DGL is not installed")
    from gnnaccel import dgl_backend

    dgl_backend.shim()
    import dgl.data

    assert all(hasattr(dgl.data, kind) for kind, _ in export.LOADERS.values())


def test_graphs_in_the_folder_of_the_user_come_before_loaders(monkeypatch, tmp_path):
    np.savez(tmp_path / "amazon_photo.npz", **arrays())
    monkeypatch.setenv(data.DATA, str(tmp_path))
    assert datasets.load("amazon_photo", "pyg", tmp_path).num_nodes == 40


# figures


def a_run(side, times, losses, pair=0, memory=2**20, sites=None, compile_ms=None, captures=()):
    measured = {
        "epoch_time_ms": times,
        "loss": losses,
        "extra_memory_bytes": memory,
        "compile_time_ms": compile_ms,
        "capture_epochs": list(captures),
        "test_accuracy": 0.5,
    }
    return results.Run(side, pair, measured, {"sites": sites or {}})


SITES = {"pyg.X": {"accelerated": 6, "left": 2, "time_ms": 1.0, "reasons": {"why": 2}}}


def test_figures_are_medians_without_the_warm_up():
    runs = [
        a_run("alone", [90.0, 80, 70, 4, 4.5, 5, 5.5, 6], [3.0] * 8),
        a_run("gnnaccel", [50.0, 40, 30, 2, 2.25, 2.5, 2.75, 3], [3.0] * 7 + [3.00001], sites=SITES),
    ]
    found = results.evaluate(runs, 1.5, tolerance=1e-4)
    assert found.warmup == 3 and found.warnings == () and found.speedups == {"gnnaccel": (2.0,)}
    time = found["epoch_time_median"]
    assert (time["alone"], time["gnnaccel"], time.ratios) == (5, 2.5, {"gnnaccel": 2})
    assert (found["epoch_time_q1"]["alone"], found["epoch_time_q3"]["alone"]) == (4.5, 5.5)
    assert found["first_epoch_surplus"]["alone"] == 85 and found["prepare_time"]["gnnaccel"] == 1.5
    assert found["peak_memory"]["gnnaccel"] == 1 and found["share_accelerated"]["gnnaccel"] == 0.75
    assert found["max_loss_difference"]["gnnaccel"] == pytest.approx(1e-5)
    assert found.left == (("gnnaccel", "pyg.X", "why", 2),)


@pytest.mark.parametrize("epochs, warmup", [(1, 0), (2, 1), (3, 1), (6, 3), (500, 3)])
def test_warm_up_leaves_epochs_to_count(epochs, warmup):
    assert results.warmup_epochs(epochs) == warmup


@pytest.mark.parametrize(
    "losses, times, sites, said",
    [
        ([1.0] * 9 + [1.01], [1.0] * 10, SITES, "differ by up to 0.01, more than the tolerance of 0.0001"),
        ([1.0] * 9 + [math.nan], [1.0] * 10, SITES, "not finite"),
        ([1.0] * 10, [1.0] * 10, {}, "saw no message-passing call"),
        ([1.0] * 10, [1.0] * 10, {"x": SITES["pyg.X"] | {"accelerated": 0}}, "no message-passing call was accelerated"),
        ([1.0] * 10, [1.0, 9.0] * 5, SITES, "scatter widely"),
        ([1.0] * 7, [1.0] * 7, SITES, "4 epochs of each run are counted, few to tell a speedup from: take more"),
        ([1.0] * 2, [1.0] * 2, SITES, "1 epoch of each run is counted, few"),
    ],
)
def test_what_spoils_a_comparison_is_a_row_of_the_table(losses, times, sites, said, capsys, tmp_path):
    count = len(losses)
    runs = [a_run("alone", [1.0] * count, [1.0] * count), a_run("gnnaccel", times, losses, sites=sites)]
    found = results.evaluate(runs, None, tolerance=1e-4)
    assert len(found.warnings) == 1 and said in found.warnings[0]
    output.show(found, "title", {side: side for side in results.SIDES}, ["[a note]"])
    printed = " ".join(capsys.readouterr().out.replace("|", " ").split())
    assert "WARNING" in printed and "note: [a note]" in printed
    output.save_results(tmp_path / "results.csv", found)
    assert said in table(tmp_path)["warning"]["text"]


def test_repeated_runs_show_how_far_the_framework_is_from_itself():
    runs = [a_run(side, [1.0] * 4, [1.0 + 0.001 * (pair + (side == "gnnaccel"))] * 4, pair, sites=SITES)
            for pair in (0, 1) for side in SIDES]  # fmt: skip
    found = results.evaluate(runs, None, tolerance=1e-4)
    assert found["max_loss_difference"]["alone"] == pytest.approx(0.001)
    assert "alone differ by up to 0.001" in found.warnings[0]


def test_memory_that_could_not_be_measured_stays_empty(tmp_path):
    runs = [a_run(side, [1.0] * 4, [1.0] * 4, memory=None, sites=SITES) for side in SIDES]
    found = results.evaluate(runs, None, tolerance=1e-4)
    output.save_results(tmp_path / "results.csv", found)
    assert table(tmp_path)["peak_memory"]["alone"] == "" and not found["peak_memory"].ratios


def sides(losses=(3.0, 3.0, 3.0, 3.0, 3.0), sites=SITES, captures=(4,)):
    """A run of each side; that which is captured at its fourth epoch takes 100 ms for it."""
    times = {side: [9.0] * 4 + [8.0 / nth] * 5 for nth, side in enumerate(results.SIDES, start=1)}
    times["gnnaccel_captured"][3] = 101.6
    own = {"gnnaccel": SITES, "gnnaccel_compiled": SITES, "gnnaccel_captured": sites}
    return [
        a_run(side, times[side], [loss] * 9, sites=own.get(side), compile_ms=7e3, captures=captures)
        for side, loss in zip(results.SIDES, losses, strict=True)
    ]


def test_more_sides_are_compared_with_the_framework_alone():
    found = results.evaluate(sides(), 1.5, tolerance=1e-4)
    assert found.sides == results.SIDES and found.warmup == 4 and found.warnings == ()
    assert found["epoch_time_median"].ratios == dict(zip(results.SIDES[1:], (2, 3, 4, 5), strict=True))
    assert found["capture_time"].values == {"gnnaccel_captured": 100}
    assert found["compile_time"].values == {"alone_compiled": 7e3, "gnnaccel_compiled": 7e3}
    assert [left.side for left in found.left] == ["gnnaccel", "gnnaccel_compiled", "gnnaccel_captured"]


def test_losses_of_every_side_are_compared_where_no_numbers_are_drawn():
    runs = sides(losses=(3.0, 3.1, 3.0, 3.2, math.nan))
    said = results.evaluate(runs, 1.5, tolerance=1e-4).warnings
    assert [re.sub(" by up.*", "", text) for text in said] == [
        "the losses of alone and alone, compiled differ",
        "the losses of alone and gnnaccel, compiled differ",
        "the losses of gnnaccel, captured are not finite",
    ]
    said = results.evaluate(runs, 1.5, tolerance=1e-4, dropout=True).warnings
    assert said == ("the losses of gnnaccel, captured are not finite",)


def test_a_step_that_was_not_captured_is_a_warning_with_its_reason():
    step = {"captured.step": {"accelerated": 0, "left": 8, "reasons": {"it waits for the GPU": 8}}}
    found = results.evaluate(sides(sites=SITES | step, captures=()), 1.5, tolerance=1e-4)
    assert found.warnings == ("gnnaccel, captured: the step was not captured: it waits for the GPU",)
    assert found["capture_time"]["gnnaccel_captured"] is None
    assert found["share_accelerated"]["gnnaccel_captured"] == 0.75  # a step is no message passing


def test_a_table_of_more_sides_has_its_ratios_in_brackets(capsys):
    found = results.evaluate(sides(), 1.5, tolerance=1e-4)
    output.show(found, "title", {side: side for side in results.SIDES}, [])
    printed = capsys.readouterr().out
    assert "1.6 (5.00x)" in printed and "left to the framework (gnnaccel_captured): 2x pyg.X: why" in printed
