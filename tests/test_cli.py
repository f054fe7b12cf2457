"""The command line: run, doctor, and how children are started."""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib import util
from pathlib import Path

import numpy as np
import pytest
from command_line import ROOT, TORCH, command

from gnnaccel import versions
from gnnaccel.cli import anonymous, children, doctor, installing, main


def test_importing_the_command_line_is_light():
    code = "import sys, gnnaccel.cli, gnnaccel.cli.app; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert "gnnaccel.cli.app" in loaded, done.stderr
    assert not loaded & {"torch", "dgl", "torch_geometric", "matplotlib", "numpy"}


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["--version"], 0, r"gnnaccel \d"),
        (["--help"], 0, "doctor"),
        (["nix"], 2, "No such command"),
        (["run"], 2, "expected script.py, or -m and a module"),
        (["run", "--nix", "script.py"], 2, "--nix"),
        (["compare"], 2, "--framework"),
        (["compare", "--framework", "tf"], 2, r"(?s)dgl.*pyg"),
        (["compare", "--framework", "pyg", "--model", "mlp"], 2, r"(?s)gcn.*sage.*gin.*gat.*agnn"),
        (["compare", "--framework", "pyg", "--device", "tpu"], 2, r"(?s)cpu.*cuda"),
        (["compare", "--framework", "pyg", "--epochs", "0"], 2, "1"),
        (["compare", "--framework", "pyg", "--dropout", "2"], 2, "1"),
    ],
)
def test_wrong_options_are_refused_with_what_is_allowed(arguments, code, said, capsys):
    assert main(arguments) == code
    shown = "".join(capsys.readouterr())
    assert re.search(said, shown), shown


# run


SCRIPT = "import os, sys; print(sys.argv[1:], os.environ['GNNACCEL'], __name__); sys.exit(int(sys.argv[1]))"


@pytest.mark.parametrize(
    "before, after, flag",
    [
        ([], ["3", "-v", "--profile", "--help", "--", "-m"], "1"),
        (["-v", "--compat"], ["0", "x y"], "compat"),
        (["-m"], ["5", "--compat"], "1"),
        (["--"], ["4"], "1"),
    ],
)
def test_run_passes_arguments_and_exit_code_through(before, after, flag, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    name = "script" if "-m" in before else "script.py"
    done = command("run", *before, name, *after, cwd=tmp_path)
    assert done.stdout == f"{after} {flag} __main__\n", done.stderr
    assert done.returncode == int(after[0])


def test_run_finds_modules_of_the_folder_it_is_called_in(tmp_path):
    """The installed command has its own folder in sys.path, where python -m has the current one."""
    (tmp_path / "script.py").write_text("import sys; print(sys.path[0])")
    call = (
        "import sys; sys.path[0] = '/nowhere'; from gnnaccel.cli import main; sys.exit(main(['run', '-m', 'script']))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", call], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == f"{tmp_path}\n", done.stderr


def test_run_writes_the_profile_where_asked(tmp_path):
    (tmp_path / "script.py").write_text("print('done')")
    done = command("run", "--profile-json", "counts.json", "script.py", cwd=tmp_path)
    assert done.stdout == "done\n", done.stderr
    assert json.loads((tmp_path / "counts.json").read_text())["sites"] == {}


@pytest.mark.parametrize("where", ["nowhere/counts.json", "."])
def test_run_looks_at_where_to_write_the_profile_first(where, tmp_path):
    (tmp_path / "script.py").write_text("print('done')")
    done = command("run", "--profile-json", where, "script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and "--profile-json: expected a file" in done.stderr


@pytest.mark.parametrize("how", [["script.py"], ["-m", "script"]])
def test_run_shows_the_programs_own_traceback(how, tmp_path):
    (tmp_path / "script.py").write_text("raise KeyError('mine')")
    done = command("run", *how, cwd=tmp_path)
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr
    assert "gnnaccel" not in done.stderr.replace(str(ROOT), "").partition("KeyError")[0].replace("[gnnaccel]", "")


# doctor


ON_GPU = TORCH | {"cuda": "13.0", "gpus": ["NVIDIA H200"], "cuda_kernels": True}
DGL = {"version": "2.1.0", "accelerated": True, "messages": []}
PYG = {"version": "2.8.1", "accelerated": True, "messages": []}


@pytest.fixture
def machine(monkeypatch):
    """Lets a test say what doctor finds, which else takes the processes of this machine."""

    def found(torch=TORCH, dgl=DGL, torch_geometric=PYG, gpus=(), switch=True, dgl_cuda=True):
        answers = {"torch": torch, "dgl": dgl, "torch_geometric": torch_geometric, "dgl_cuda": {"has_cuda": dgl_cuda}}
        numbers = {name: (answer or {}).get("version") for name, answer in answers.items()}
        monkeypatch.setattr(children, "ask", lambda question: answers[question])
        monkeypatch.setattr(children, "switch_is_installed", lambda: switch)
        monkeypatch.setattr(doctor, "version", numbers.get)
        monkeypatch.setattr(doctor.util, "find_spec", lambda name: (answers.get(name) is not None and name) or None)
        monkeypatch.setattr(doctor, "gpus_of_the_machine", lambda: list(gpus))

    monkeypatch.delenv("GNNACCEL", raising=False)
    return found


@pytest.mark.parametrize(
    "found, code, said",
    [
        ({}, 0, ["DGL 2.1.0 imports, and will be accelerated", "CPU kernels alone", "avx2", "ready"]),
        ({"dgl": None}, 0, ["DGL not installed (gnnaccel is run with dgl==2.1.0)", "ready"]),
        ({"dgl": None, "torch_geometric": None}, 1, ["nothing can be accelerated here"]),
        ({"dgl": {"error": "ImportError: broken"}}, 0, ["cannot be imported: ImportError: broken", "ready"]),
        (
            {"dgl": None, "torch_geometric": {"version": "2.8.1", "accelerated": False, "messages": ["no such hook"]}},
            1,
            ["PyTorch Geometric 2.8.1 no such hook"],
        ),
        ({"torch": ON_GPU}, 0, ["its own CUDA build keeps graphs on the GPU"]),
        ({"torch": ON_GPU, "dgl_cuda": False}, 0, ["gnnaccel's bridge takes graphs to the GPU"]),
        ({"torch_geometric": PYG | {"version": "2.3.0"}}, 0, ["2.3.0 was never tried: gnnaccel is run with 2.5"]),
        ({"torch": TORCH | {"version": "2.99.1"}}, 0, ["torch 2.99.1 was never tried: gnnaccel is run with"]),
        (
            {"torch": TORCH | {"missing": {"torch.a": "slower"}}, "dgl": DGL | {"missing": {"dgl.b": "no batches"}}},
            0,
            ["names missing torch.a, therefore: slower", "dgl.b, therefore: no batches", "ready"],
        ),
        ({"torch": TORCH | {"version": "2.0.1"}}, 0, ["2.0.1: too old, gnnaccel needs 2.4 or later"]),
        ({"torch": {"error": "ImportError: no"}}, 1, ["torch cannot be imported: ImportError: no"]),
        ({"torch": TORCH | {"binary_error": "build it"}}, 1, ["build it"]),
        ({"gpus": ["H200"]}, 0, ["docs/install.md has the build with CUDA", "the driver lists H200"]),
        ({"torch": TORCH | {"cuda_kernels": True, "gpus": ["H200"]}}, 0, ["CPU and CUDA kernels; both", "H200"]),
        ({"torch": TORCH | {"cuda_kernels": True}}, 0, ["torch sees no GPU here"]),
        (
            {"torch": ON_GPU | {"messages": {"nvrtc": "13.0", "why": None, "folder": "/cache/kernels"}}},
            0,
            ["messages on CUDA one kernel each, compiled by NVRTC 13.0, kept in /cache/kernels"],
        ),
        (
            {"torch": ON_GPU | {"messages": {"nvrtc": None, "why": "NVRTC was not found", "folder": "/cache"}}},
            0,
            ["messages on CUDA stored: NVRTC was not found"],
        ),
        ({"switch": False}, 0, ["GNNACCEL=1 has no effect"]),
    ],
)
def test_doctor_says_what_is_the_matter(found, code, said, machine, capsys):
    machine(**found)
    assert main(["doctor"]) == code
    shown = re.sub(" +", " ", capsys.readouterr().out)
    for text in said:
        assert text in shown


@pytest.mark.parametrize(
    "value, means", [("1", "1 (on)"), ("compat", "compat (compat)"), ("maybe", "error: GNNACCEL=")]
)
def test_doctor_reads_the_flag(value, means, machine, monkeypatch, capsys):
    machine()
    monkeypatch.setenv("GNNACCEL", value)
    main(["doctor"])
    assert means in capsys.readouterr().out


def test_doctor_examines_this_machine(capsys):
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["usable"] else 1)
    assert found["build"]["loads"] and found["build"]["instruction_set"] in ("avx512", "avx2", "baseline")
    assert found["devices"]["cpu"] and found["devices"]["cores"] >= 1 and found["devices"]["threads"] >= 1
    for name, one in found["frameworks"].items():
        if util.find_spec(name) is not None:
            assert one["imports"] and one["accelerated"], one["advice"]


@pytest.mark.parametrize(
    "found, said, next_one",
    [
        ({}, ["PyG: sums", "DGL: attention", "DGL's plain sums"], "-m gnnaccel --profile train.py"),
        ({"dgl": None}, ["PyG: sums", "expect 1 to 4 times"], "-m gnnaccel --profile train.py"),
        ({"torch": ON_GPU}, ["on the CPU and the GPU", "a step waits for Python"], "-m gnnaccel --profile"),
        (
            {"torch": ON_GPU | {"cuda_kernels": False}},
            ["this build has no CUDA half"],
            "GNNACCEL_CUDA=ON ",
        ),
        (
            {"gpus": ["H200"], "torch": TORCH | {"version": "2.8.0+cpu"}},
            ["the GPU: torch 2.8.0+cpu is a build without CUDA"],
            "pip install --force-reinstall torch==2.8.0",
        ),
        (
            {"gpus": ["H200"], "torch": TORCH | {"cuda": "13.0"}},
            ["the GPU: torch 2.13.0 sees none: often a driver older than CUDA 13.0"],
            "-m gnnaccel --profile train.py",
        ),
        ({"torch": TORCH | {"isa": "baseline"}}, ["it has no AVX2"], "-m gnnaccel"),
        ({"torch": TORCH | {"threads": 10**6}}, ["torch runs 1000000 threads on"], "-m gnnaccel"),
        ({"dgl": None, "torch_geometric": None}, [], "pip install torch_geometric==2.8.1    # or dgl==2.1.0"),
        (
            {"torch": TORCH | {"version": "2.0.1"}},
            [],
            "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu",
        ),
        (
            {"torch": TORCH | {"version": "2.0.1", "binary_error": "no name 'Tensor'"}, "gpus": ["H200"]},
            ["everything: gnnaccel needs torch 2.4 or later"],
            "pip install torch==2.13.0",
        ),
        ({"torch": TORCH | {"binary_error": "build it"}}, ["everything: build it"], f"pip install -e {ROOT}"),
        (
            {"dgl": None, "torch_geometric": PYG | {"accelerated": False, "messages": ["no such hook"]}},
            ["PyTorch Geometric: no such hook"],
            "gnnaccel doctor --report report.json",
        ),
    ],
)
def test_doctor_says_what_will_be_fast_what_not_and_what_to_do(found, said, next_one, machine, capsys):
    machine(**found)
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    for text in said:
        assert any(text in line for line in lines), text
    assert lines[-1].startswith("next") and next_one in lines[-1]
    assert len(lines) <= 24, "one screen"


@pytest.mark.parametrize(
    ("average", "all_cores", "said"), [(7.0, 2, "a load of 3.5 on each core"), (7.0, 64, None), (OSError, 2, None)]
)
def test_doctor_says_that_the_machine_is_busy(average, all_cores, said, machine, monkeypatch, capsys):
    """Of all its cores: a process in a container, or kept to some of them, sees the load of the others."""

    def getloadavg():
        if average is OSError:
            raise OSError("Load averages are unobtainable")
        return average, 0.0, 0.0

    machine()
    monkeypatch.setattr(doctor, "cores", lambda: TORCH["threads"])
    monkeypatch.setattr(doctor.os, "getloadavg", getloadavg)
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: all_cores)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert ("the machine is busy" in shown) == (said is not None) and (said or "") in shown


def test_doctor_says_what_is_wrong_with_the_environment(machine, monkeypatch, capsys):
    machine()
    monkeypatch.setenv("GNNACCEL_BACKWARD", "thread")
    monkeypatch.setenv("GNNACCEL_ISA", "avx512")
    main(["doctor"])
    shown = capsys.readouterr().out
    assert "GNNACCEL_BACKWARD=thread is not understood: expected threads" in shown
    assert "for avx2, picked at run time; GNNACCEL_ISA=avx512, which this CPU lacks, is not used" in shown


@pytest.mark.parametrize(
    "arguments", [["report.json"], ["--report", "nowhere/report.json"], ["--report", "."], ["--json", "x"]]
)
def test_doctor_writes_a_report_where_that_is_possible(arguments, capsys):
    assert main(["doctor", *arguments]) == 2
    assert "expected --report and a file in a folder that is there" in capsys.readouterr().err


def test_a_report_tells_of_no_user_and_no_machine(machine, monkeypatch, tmp_path, capsys):
    home = tmp_path / "janedoe"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", "jane.doe")
    monkeypatch.setattr(anonymous.platform, "node", lambda: "bigbox.lab.example")
    monkeypatch.setenv("GNNACCEL_DATA", "/data/secret")
    monkeypatch.setenv("GNNACCEL_SAMPLER", "cuda")
    why = f"no file '{home}/.cache/x y', nor /home/bob/z.so: jane.doe on bigbox and bigbox.lab.example, janedoes"
    machine(torch=TORCH | {"binary_error": why}, dgl={"error": rf"C:\\Users\\bob\\z.dll, {home}"})
    assert main(["doctor", "--report", str(tmp_path / "report.json")]) == 1
    text = (tmp_path / "report.json").read_text()
    found = json.loads(text)
    left = "no file '<home> y', nor <home>: <user> on <host> and <host>, janedoes"
    assert found["build"]["advice"] == left and sys.executable not in text
    assert found["frameworks"]["dgl"]["advice"] == "cannot be imported: <home>, <home>"
    assert found["variables"]["GNNACCEL_DATA"] == "set" and found["variables"]["GNNACCEL_SAMPLER"] == "cuda"
    for secret in ("jane.doe", "bigbox", "secret", "bob", str(home)):
        assert secret not in text
    capsys.readouterr()
    assert main(["doctor", "--report"]) == 1
    assert json.loads(capsys.readouterr().out) == found


def test_doctor_knows_the_versions_of_the_build_files():
    pins = re.findall(r'"(dgl|torch_geometric)==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    pins += re.findall(r"^TORCH \?= (torch)==([\d.]+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert dict(pins) == versions.PINNED


@pytest.mark.parametrize(
    "has, command",
    [
        ({"pip": "{bin}/pip"}, "pip install x"),
        ({"pip": "/another/bin/pip"}, "{python} -m pip install x"),
        ({"pip": None}, "{python} -m pip install x"),
        ({"no pip": True, "uv": "/bin/uv"}, "uv pip install --python {python} x"),
        ({"no pip": True, "uv": "/bin/uv", "VIRTUAL_ENV": "{prefix}"}, "uv pip install x"),
        ({"no pip": True, "conda": True}, "conda install -y -p {prefix} pip && A=1 {python} -m pip install x"),
        ({"no pip": True}, "{python} -m ensurepip && A=1 {python} -m pip install x"),
    ],
)
def test_packages_are_installed_by_what_the_environment_has(has, command, monkeypatch, tmp_path):
    (tmp_path / "my env" / "bin").mkdir(parents=True)
    if "conda" in has:
        (tmp_path / "my env" / "conda-meta").mkdir()
    names = {"prefix": str(tmp_path / "my env"), "bin": str(tmp_path / "my env" / "bin")}
    names["python"] = names["bin"] + "/python"
    has = {key: value.format(**names) if isinstance(value, str) else value for key, value in has.items()}
    monkeypatch.setattr(sys, "executable", names["python"])
    monkeypatch.setattr(sys, "prefix", names["prefix"])
    monkeypatch.setattr(installing, "_has_pip", lambda: "no pip" not in has)
    monkeypatch.setattr(installing.shutil, "which", has.get)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    if "VIRTUAL_ENV" in has:
        monkeypatch.setenv("VIRTUAL_ENV", has["VIRTUAL_ENV"])
    words = command.format(**{key: shlex.quote(name) for key, name in names.items()})
    assert installing.install("x", "A=1 ") == (words if "A=1" in words else f"A=1 {words}")


def test_python_is_that_of_the_environment(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/my env/bin/python3")
    for found, words in (("/my env/bin/python", "python"), ("/bin/python", "'/my env/bin/python3'")):
        monkeypatch.setattr(installing.shutil, "which", {"python": found}.get)
        assert installing.python() == words


@pytest.mark.parametrize(
    "gpu, nvcc, root, command",
    [
        (False, None, None, "pip install .    # in a clone of gnnaccel"),
        (False, "/nvcc", None, "GNNACCEL_CUDA=OFF pip install .    # in a clone of gnnaccel"),
        (True, "/nvcc", Path("/src"), "GNNACCEL_CUDA=ON pip install -e /src"),
        (
            True,
            None,
            None,
            "GNNACCEL_CUDA=ON pip install .    # in a clone of gnnaccel, with nvcc (CUDA 12 or later) on the path",
        ),
    ],
)
def test_gnnaccel_is_installed_with_the_half_that_is_wanted(gpu, nvcc, root, command, monkeypatch):
    pip = os.path.join(os.path.dirname(sys.executable), "pip")
    monkeypatch.setattr(installing, "_has_pip", lambda: True)
    monkeypatch.setattr(installing.shutil, "which", {"pip": pip, "nvcc": nvcc}.get)
    monkeypatch.setattr(installing, "clone", lambda: root)
    assert installing.gnnaccel(gpu) == command


def test_no_command_for_a_framework_without_a_build_for_this_python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    assert installing.framework("dgl", "2.1.0") == "dgl 2.1.0 has no build for this Python, 3.12 is the last"
    assert installing.framework("torch_geometric", "2.8.1").endswith("pip install torch_geometric==2.8.1")


# how children are started


@pytest.mark.parametrize(
    "installed, mode, words, flags",
    [
        (True, "off", [], {}),
        (True, "compat", [], {"GNNACCEL": "compat"}),
        (True, "on", [], {"GNNACCEL": "1", "GNNACCEL_PROFILE": "p.json"}),
        (False, "off", [], {}),
        (False, "compat", ["-m", "gnnaccel", "--compat"], {}),
        (False, "on", ["-m", "gnnaccel", "--profile-json", "p.json"], {}),
    ],
)
def test_children_start_with_the_flag_or_where_it_has_no_effect_with_the_launcher(
    installed, mode, words, flags, monkeypatch
):
    monkeypatch.setattr(children, "switch_is_installed", lambda: installed)
    names = ("GNNACCEL", "GNNACCEL_PROFILE", "GNNACCEL_VERBOSE")
    for name in names:
        monkeypatch.setenv(name, "1")  # of a user who has it set: must not reach the run alone
    start, env = children.command(mode, Path("p.json") if mode == "on" else None)
    assert start == [sys.executable, *words]
    assert {key: env[key] for key in names if key in env} == flags
    assert installed or env["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


def test_a_probe_that_breaks_is_an_answer():
    assert "no_such_framework" in children.ask("no_such_framework")["error"]


# inspect


def test_inspect_prints_and_draws(capsys, tmp_path):
    chart = tmp_path / "cora.png"
    assert main(["inspect", "cora", "--json", "--png", str(chart)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["dataset"], found["nodes"], found["edges"]) == ("cora", 2708, 10556)
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert main(["inspect", "cora"]) == 0
    shown = capsys.readouterr().out
    edges = tmp_path / "own.txt"
    edges.write_text("0 1\n1 2\n")
    assert main(["inspect", str(edges), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"] == 3
    assert "neighbour similarity" in shown and "16 x 8" in shown and "are needed for tiles to pay" in shown
    assert "communities of" in shown and "modularity" in shown and "64 float32 features: groups of 16" in shown
    assert "CPU: rows as they lie, in parts of equal work\n" in shown
    advice = found["advice"]
    assert [a["num_feats"] for a in advice["advised"]] == [16, 64, 256] and all(a["reason"] for a in advice["advised"])
    assert (
        0 < advice["hit_rate"] < advice["hit_rate_in_communities"] < 1
        and 0.7 < advice["communities"]["modularity"] < 0.9
    )


@pytest.mark.parametrize("edges", [[[], []], [[0, 1, 2], [1, 2, 0]]])
def test_inspect_draws_small_graphs(edges, tmp_path):
    np.savez(tmp_path / "own.npz", edge_index=np.array(edges, dtype=np.int64).reshape(2, -1))
    assert main(["inspect", str(tmp_path / "own.npz"), "--png", str(tmp_path / "own.png")]) == 0
    assert (tmp_path / "own.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("png", ["", "own", "own.jpg", "nowhere/own.png"])
def test_inspect_looks_at_where_to_draw_first(png, capsys, tmp_path):
    assert main(["inspect", "cora", "--png", str(tmp_path / png)]) == 2
    said = capsys.readouterr()
    assert "a name that ends in .png" in said.err and not said.out and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["nowhere.npz", "nowhere.mtx", "nowhere"])
def test_inspect_of_a_graph_that_is_not_there(name, capsys):
    assert main(["inspect", name]) == 2
    said = capsys.readouterr().err
    assert f"no file '{name}'" in said or f"unknown graph '{name}'" in said


def test_inspect_of_a_file_that_is_no_graph(capsys, tmp_path):
    (tmp_path / "own.npz").write_text("nothing")
    assert main(["inspect", str(tmp_path / "own.npz")]) == 1
    assert "own.npz" in capsys.readouterr().err
