"""The flag, the import hook, the launcher and the exit report, each in a fresh Python with stand-in frameworks.

The frameworks and backends here are files of a few lines: what is tested is when the switch calls what. The real
backends have their own tests.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gnnaccel import versions

ROOT = Path(__file__).resolve().parent.parent
PTH = (ROOT / "gnnaccel.pth").read_text(encoding="utf-8")

# Backends that say what is asked of them. They are put into sys.modules, so that no binary is loaded.
BACKENDS = """
import sys, types
def backend(name, framework):
    module = types.ModuleType(f"gnnaccel.{name}")
    module.shim = lambda: print("shim", framework in sys.modules)
    module.guard_sampling = lambda: None
    module.enable = lambda: print("enable", framework)
    module.disable = lambda: print("disable", framework)
    sys.modules[f"gnnaccel.{name}"] = module
backend("dgl_backend", "dgl")
backend("pyg_backend", "torch_geometric")
"""


@pytest.fixture
def world(tmp_path):
    """A folder with stand-in frameworks, and a function that runs Python code in it."""
    for name in ("dgl", "torch_geometric"):
        (tmp_path / name).mkdir()
        version = versions.PINNED[name]
        (tmp_path / name / "__init__.py").write_text(f"print('importing {name}')\n__version__ = {version!r}\n")
    (tmp_path / "backends.py").write_text(BACKENDS)

    def run(code, *args, launcher=(), check=True, **environment):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(code))
        env = {k: v for k, v in os.environ.items() if "GNNACCEL" not in k and k != "THP_MEM_ALLOC_ENABLE"}
        env["PYTHONPATH"] = os.pathsep.join((str(tmp_path), str(ROOT)))
        command = [sys.executable, *launcher, str(script), *args]
        done = subprocess.run(command, env=env | environment, capture_output=True, text=True, cwd=tmp_path)
        assert not check or done.returncode == 0, done.stderr
        return done

    run.path = tmp_path
    return run


def started(world, code, **environment):
    """Run `code` after the line of the .pth file, as a Python with gnnaccel installed would."""
    (world.path / "started.py").write_text(PTH)
    return world(f"import started\n{textwrap.dedent(code)}", **environment)


def lines(done):
    return done.stdout.splitlines()


def test_untried_versions_are_said_once(world):
    code = """
    import backends, gnnaccel.versions
    gnnaccel.versions.TRIED["dgl"] = ("1.0", "1.1")
    gnnaccel.install()
    import dgl, torch_geometric
    gnnaccel.uninstall()
    gnnaccel.install()
    """
    said = world(code).stderr.splitlines()
    assert said == ["gnnaccel: dgl 2.1.0 was never tried: gnnaccel is run with 1.0 to 1.1"]


def test_hook_prepares_dgl_before_and_enables_after_the_import(world):
    done = world("import backends, gnnaccel; gnnaccel.install(); import dgl, torch_geometric")
    assert lines(done) == [
        "shim False",
        "importing dgl",
        "enable dgl",
        "importing torch_geometric",
        "enable torch_geometric",
    ]


def test_hook_leaves_no_trace_on_the_framework(world):
    done = world("""
        import backends, gnnaccel; gnnaccel.install()
        import dgl
        print(type(dgl.__loader__).__name__, dgl.__spec__.loader is dgl.__loader__)
    """)
    assert lines(done)[-1] == "SourceFileLoader True"


def test_frameworks_imported_before_install_are_enabled_at_once(world):
    done = world("import backends, dgl, torch_geometric, gnnaccel; gnnaccel.install(); gnnaccel.install()")
    assert lines(done)[2:] == ["enable dgl", "enable torch_geometric"]


def test_compat_only_makes_dgl_importable_and_can_be_raised(world):
    code = """
        import os, backends, gnnaccel
        gnnaccel.install(compat_only=True)
        import dgl, torch_geometric
        print(os.environ["GNNACCEL"])
        gnnaccel.install()
        gnnaccel.install(compat_only=True)
        print(os.environ["GNNACCEL"])
    """
    assert lines(world(code)) == [
        "shim False",
        "importing dgl",
        "importing torch_geometric",
        "compat",
        "enable dgl",
        "enable torch_geometric",
        "1",
    ]


@pytest.mark.parametrize("flag", ["1", "compat"])
def test_dgl_sampling_is_guarded_with_and_without_acceleration(world, flag):
    code = """
        import backends, sys
        sys.modules["gnnaccel.dgl_backend"].guard_sampling = lambda: print("guard")
        import dgl
    """
    assert lines(started(world, code, GNNACCEL=flag)).count("guard") == 1


def test_uninstall_restores_everything(world):
    done = world("""
        import os, sys, backends, gnnaccel
        finders = list(sys.meta_path)
        gnnaccel.install()
        import dgl
        gnnaccel.uninstall()
        gnnaccel.uninstall()
        print(sys.meta_path == finders, "GNNACCEL" in os.environ)
        import torch_geometric
    """)
    assert lines(done)[2:] == ["enable dgl", "disable dgl", "True False", "importing torch_geometric"]


def test_install_again_after_uninstall(world):
    code = "import backends, gnnaccel as g, dgl; g.install(); g.uninstall(); g.install()"
    assert lines(world(code))[1:] == ["enable dgl", "disable dgl", "enable dgl"]


def test_ipython_extension(world):
    code = "import backends, gnnaccel as g, dgl; g.load_ipython_extension(None); g.unload_ipython_extension(None)"
    assert lines(world(code))[1:] == ["enable dgl", "disable dgl"]


def test_failing_import_of_a_framework_keeps_its_error(world):
    (world.path / "dgl" / "__init__.py").write_text("raise ImportError('broken wheel')\n")
    done = world("""
        import backends, gnnaccel; gnnaccel.install()
        for _ in range(2):
            try:
                import dgl
            except ImportError as error:
                print(error)
    """)
    assert lines(done) == ["shim False", "broken wheel"] * 2


def test_missing_binary_warns_and_the_framework_runs(world):
    done = world("""
        import sys
        sys.modules["gnnaccel._C"] = None  # what Python makes of an import that cannot be done
        import gnnaccel; gnnaccel.install()
        import torch_geometric
        print(torch_geometric.__version__)
    """)
    assert lines(done) == ["importing torch_geometric", versions.PINNED["torch_geometric"]]
    assert "PyTorch Geometric runs without acceleration" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_backend_that_fails_to_enable_is_disabled_again(world):
    done = world("""
        import backends, sys, gnnaccel
        def fail(): raise AttributeError("moved")
        sys.modules["gnnaccel.dgl_backend"].enable = fail
        gnnaccel.install()
        import dgl
    """)
    assert lines(done)[-1] == "disable dgl"
    assert "DGL runs without acceleration: AttributeError: moved" in done.stderr


@pytest.mark.parametrize("value", ["", "0", "off", "False", "no", None])
def test_flag_off_loads_nothing(world, value):
    code = "import sys; print(sorted({'torch', 'gnnaccel.report', 'logging'} & set(sys.modules)), len(sys.meta_path))"
    bare = world(code)
    done = started(world, code, **({} if value is None else {"GNNACCEL": value}))
    assert done.stdout == bare.stdout
    assert not done.stderr


@pytest.mark.parametrize("value", ["", "0", None])
def test_python_start_without_the_flag_imports_no_module_of_ours(world, value):
    code = "import sys; print([m for m in sys.modules if m.startswith(('gnnaccel', 'torch', 'numpy', 'dgl'))])"
    done = started(world, code, **({} if value is None else {"GNNACCEL": value}))
    assert done.stdout.strip() == "[]"


def test_start_with_the_flag_imports_the_switch_alone(world):
    code = "import sys; print(sorted(m for m in sys.modules if m.startswith(('gnnaccel', 'torch', 'numpy', 'rich'))))"
    done = started(world, code, GNNACCEL="1")
    assert done.stdout.strip() == "['gnnaccel', 'gnnaccel.settings', 'gnnaccel.switch']"


@pytest.mark.parametrize("value", ["1", "on", "TRUE", " yes "])
def test_flag_on(world, value):
    assert lines(started(world, "import backends, dgl", GNNACCEL=value))[-1] == "enable dgl"


def test_flag_compat(world):
    done = started(world, "import backends, dgl, torch_geometric", GNNACCEL="compat")
    assert lines(done) == ["shim False", "importing dgl", "importing torch_geometric"]


def test_flag_not_understood_is_one_line_and_python_starts(world):
    done = started(world, "print('here')", GNNACCEL="fast")
    assert lines(done) == ["here"]
    assert done.stderr == "gnnaccel: stays off: GNNACCEL=fast is not understood: expected 1, 0 or compat\n"


def test_pth_file_left_behind_is_one_line(world):
    # Where these tests run, gnnaccel is installed, and its own .pth file has come first: forget it.
    code = """
        import sys
        for name in [n for n in sys.modules if n.startswith("gnnaccel")]:
            del sys.modules[name]
        sys.modules["gnnaccel"] = None
    """
    code = textwrap.dedent(code) + PTH + "print('here')"
    done = world(code, GNNACCEL="1")
    assert lines(done) == ["here"]
    assert done.stderr.startswith("gnnaccel: stays off: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_inherit_and_only_the_main_process_reports(world, method):
    (world.path / "started.py").write_text(PTH)
    done = world(
        f"""
        import started, backends
        import multiprocessing
        def work():
            import dgl
            from gnnaccel import report
            report.count("worker")
        if __name__ == "__main__":
            import gnnaccel
            gnnaccel.install()
            worker = multiprocessing.get_context("{method}").Process(target=work)
            worker.start(); worker.join()
            import torch_geometric
            from gnnaccel import report
            report.count("main")
        """,
        GNNACCEL_PROFILE="1",
    )
    assert lines(done).count("enable dgl") == 1
    assert "main" in done.stderr
    assert "worker" not in done.stderr
    assert done.stderr.count("calls accelerated") == 1


def test_profile_file(world):
    target = world.path / "profile.json"
    code = """
        import started, backends, torch_geometric
        from gnnaccel import report
        with report.accelerated("pyg.GCNConv"):
            pass
        report.fallback("pyg.PNAConv", "aggregates in several ways")
    """
    (world.path / "started.py").write_text(PTH)
    done = world(code, GNNACCEL="1", GNNACCEL_PROFILE=str(target))
    assert not done.stderr
    profile = json.loads(target.read_text())
    assert profile["share"] == 0.5
    assert profile["sites"]["pyg.GCNConv"]["accelerated"] == 1
    assert profile["sites"]["pyg.GCNConv"]["time_ms"] > 0
    assert profile["sites"]["pyg.PNAConv"]["reasons"] == {"aggregates in several ways": 1}


def test_profile_file_that_cannot_be_written_is_one_line(world):
    done = started(world, "import backends, dgl", GNNACCEL="1", GNNACCEL_PROFILE=str(world.path / "no" / "file"))
    assert done.stderr.startswith("gnnaccel: the profile could not be written") and done.stderr.count("\n") == 1


def test_profile_table_names_kinds_reasons_and_share(world):
    code = """
        import backends, dgl
        from gnnaccel import report
        report.count("dgl.copy_u.sum")
        for _ in range(3):
            report.fallback("dgl.udf", "a user-defined reduce")
    """
    done = started(world, code, GNNACCEL="1", GNNACCEL_PROFILE="1")
    assert "25.0% of 4 calls accelerated" in done.stderr
    assert "3x a user-defined reduce" in done.stderr


@pytest.mark.parametrize("asked", ["GNNACCEL_VERBOSE", "GNNACCEL_PROFILE"])
def test_flag_without_a_framework_is_said_when_asked(world, asked):
    code = """
        import importlib.machinery
        importlib.machinery.PathFinder.find_spec = lambda *args: None  # nothing is installed
        try:
            import dgl
        except ModuleNotFoundError as error:
            print(error)
        importlib.machinery.PathFinder.find_spec = find_spec
    """
    keep = "import importlib.machinery; find_spec = importlib.machinery.PathFinder.find_spec\n"
    done = started(world, keep + textwrap.dedent(code), GNNACCEL="1", **{asked: "1"})
    assert lines(done) == ["No module named 'dgl'"]
    assert "imported neither DGL nor PyTorch Geometric: nothing to accelerate (not installed: dgl)" in done.stderr


def test_torchrun_itself_has_nothing_to_accelerate(world):
    done = started(world, "import torch.distributed.run", GNNACCEL="1", GNNACCEL_PROFILE="1")
    assert "torchrun ran the ranks" in done.stderr and "imported neither" not in done.stderr


def test_flag_without_a_framework_is_silent_otherwise(world):
    assert not started(world, "print('here')", GNNACCEL="1").stderr


def test_launcher_gives_the_script_its_own_main(world):
    done = world(
        """
        import sys
        print(sys.argv[1:], __name__, sys.modules["__main__"].__dict__ is globals(), __spec__, __file__ == sys.argv[0])
        print(sys.path[0] == __file__.rpartition("/")[0])
        """,
        "-v",
        "--profile",
        "x",
        launcher=("-m", "gnnaccel"),
    )
    assert lines(done) == ["['-v', '--profile', 'x'] __main__ True None True", "True"]
    assert not done.stderr


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(7)", 7), ("1 / 0", 1), ("exit()", 0)])
def test_launcher_keeps_exit_codes(world, code, expected):
    assert world(code, launcher=("-m", "gnnaccel"), check=False).returncode == expected


def test_launcher_keeps_tracebacks(world):
    code = "def f():\n    raise ValueError('wrong')\nf()"
    plain, launched = (world(code, launcher=launcher, check=False) for launcher in ((), ("-m", "gnnaccel")))
    assert launched.stderr == plain.stderr


def test_launcher_runs_modules(world):
    (world.path / "pack").mkdir()
    (world.path / "pack" / "__main__.py").write_text("import sys; print(sys.argv[1:], __name__, __package__)")
    done = world("", "-v", launcher=("-m", "gnnaccel", "-m", "pack"))
    assert lines(done)[0].endswith("'-v'] __main__ pack")


def test_launcher_options(world):
    code = "import os, backends, dgl; print(os.environ['GNNACCEL'])"
    done = world(code, launcher=("-m", "gnnaccel", "--compat", "-v", "--profile"))
    assert lines(done) == ["shim False", "importing dgl", "compat"]
    assert "compat: nothing is accelerated" in done.stderr


def test_launcher_without_a_program_or_with_a_missing_one(world):
    command = [sys.executable, "-m", "gnnaccel"]
    for arguments, message in (([], "expected a script"), (["no_such_file.py"], "can't open file 'no_such_file.py'")):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode, message in done.stderr) == (2, True)


@pytest.mark.parametrize(
    "system, before, flag, expected",
    [
        ("always [madvise] never", None, "1", ["1", "None"]),
        ("always [madvise] never", "0", "1", ["0", "0"]),
        ("always [madvise] never", None, "compat", ["None", "None"]),
        ("[always] madvise never", None, "1", ["None", "None"]),
        (None, None, "1", ["None", "None"]),
    ],
)
def test_huge_pages_are_asked_for_before_torch(world, system, before, flag, expected):
    place = world.path / "enabled"
    if system is not None:
        place.write_text(system)
    done = started(
        world,
        f"""
            import os, sys
            import gnnaccel.engine
            gnnaccel.engine.SYSTEM = {str(place)!r}
            assert "torch" not in sys.modules
            import torch
            print(os.environ.get("THP_MEM_ALLOC_ENABLE"))
            gnnaccel.uninstall()
            print(os.environ.get("THP_MEM_ALLOC_ENABLE"))
        """,
        GNNACCEL=flag,
        **({} if before is None else {"THP_MEM_ALLOC_ENABLE": before}),
    )
    assert lines(done) == expected
