"""Environment variables: all that are read are documented, and what is not understood is said."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gnnaccel import settings
from gnnaccel.sampling import choice

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "environment.md").read_text("utf-8")
OURS = re.compile(r"_?GNNACCEL(_[A-Z]+)*")


def read_by_python(path):
    """Names of variables in a source: what os.environ or getenv is asked for, and whatever looks like one of ours."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and OURS.fullmatch(node.value):
            names.add(node.value)
        asked = node.args[0] if isinstance(node, ast.Call) and node.args else getattr(node, "slice", None)
        if isinstance(asked, ast.Constant) and isinstance(asked.value, str):
            holder = ast.unparse(node.func if isinstance(node, ast.Call) else node.value)
            if re.search(r"environ(\.\w+)?$|getenv$", holder):
                names.add(asked.value)
    return names


PATTERNS = {  # what else reads the environment
    "cpp/*": r'getenv\("(\w+)"\)',
    "cuda/*.c*": r'getenv\("(\w+)"\)',
    "CMakeLists.txt": r"ENV\{(\w+)\}",
    "cuda/CMakeLists.txt": r"ENV\{?\s*(\w+)\}",
    "Makefile": r"^(?:export )?(\w+) \?=|\$\(or \$\((\w+)\)|\$\$\{(\w+):-",
}


def read():
    """Names of the variables that the package, its build and its Makefile read."""
    names = set()
    for path in [ROOT / "setup.py", *ROOT.glob("gnnaccel/**/*.py")]:
        names |= read_by_python(path)
    for files, pattern in PATTERNS.items():
        for path in ROOT.glob(files):
            for found in re.finditer(pattern, path.read_text("utf-8"), re.MULTILINE):
                names |= {name for name in found.groups() if name}
    return names


def test_the_page_has_every_variable_that_is_read():
    names = read()
    assert {"GNNACCEL", "GNNACCEL_ISA", "CUDAARCHS", "XDG_CACHE_HOME", "CMAKE_ARGS", "MINUTES", "MAX_JOBS"} <= names
    documented = set(re.findall(r"`(\w+)`", PAGE))
    assert names - documented == set()


def test_the_page_and_the_table_have_the_same_variables():
    documented = set(re.findall(r"`(GNNACCEL(?:_[A-Z_]+)?)`", PAGE))
    assert documented == set(settings.VALUES)
    for name, allowed in settings.VALUES.items():
        row = re.search(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
        for word in allowed or ():
            assert row and (f"`{word}`" in row[0].lower() or word in ("0", "1")), (name, word)


@pytest.fixture
def environment(monkeypatch):
    """Sets variables, with no other of ours set."""
    for name in [name for name in os.environ if OURS.fullmatch(name)]:
        monkeypatch.delenv(name)
    return lambda **given: [monkeypatch.setenv(name, value) for name, value in given.items()]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("GNNACCEL_SAMPLER", "framwork", "GNNACCEL_SAMPLER=framwork is not understood: expected framework or cuda"),
        ("GNNACCEL_BACKWARD", "thread", "GNNACCEL_BACKWARD=thread is not understood: expected threads"),
        ("GNNACCEL_CUDA_GRAPHS", "2", "GNNACCEL_CUDA_GRAPHS=2 is not understood: expected 1 or 0"),
        ("GNNACCEL_VERBOSE", "maybe", "GNNACCEL_VERBOSE=maybe is not understood: expected 1 or 0"),
        ("GNNACCEL_ISA", "sse", "GNNACCEL_ISA=sse is not understood: expected baseline, avx2 or avx512"),
        ("GNNACCEL_DGL_KERNELS", "ours", "GNNACCEL_DGL_KERNELS=ours is not understood: expected torch"),
        ("GNNACCEL_PROFLE", "1", "GNNACCEL_PROFLE is no variable of gnnaccel: did you mean GNNACCEL_PROFILE?"),
        (
            "GNNACCEL_WORLD_PEACE",
            "1",
            "GNNACCEL_WORLD_PEACE is no variable of gnnaccel: there are GNNACCEL, GNNACCEL_AGE",
        ),
        ("GNNACCEL_SAMPLER", " CUDA ", None),
        ("GNNACCEL_SAMPLER", "", None),
        ("GNNACCEL_VERBOSE", "Yes", None),
        ("GNNACCEL_PROFILE", "counts.json", None),
        ("GNNACCELERATOR", "x", None),
    ],
)
def test_what_is_not_understood_is_said(environment, name, value, said):
    environment(**{name: value})
    found = settings.complaints()
    assert not found if said is None else len(found) == 1 and found[0].startswith(said)
    assert name not in settings.VALUES or not said or not settings.is_on(name)


def test_values(environment):
    environment(GNNACCEL_BACKWARD=" Threads", GNNACCEL_VERBOSE="off", GNNACCEL_PROFILE="Counts.json")
    assert settings.value("GNNACCEL_BACKWARD") == "threads" and settings.value("GNNACCEL_SAMPLER") == ""
    assert not settings.is_on("GNNACCEL_VERBOSE") and settings.is_on("GNNACCEL_PROFILE")


def test_a_sampler_that_there_is_not_is_an_error_where_one_is_asked(environment):
    environment(GNNACCEL_SAMPLER="fast")
    with pytest.raises(ValueError, match="GNNACCEL_SAMPLER=fast is not understood: expected framework or cuda"):
        choice.is_cuda()


def test_complaints_are_made_once_when_switched_on(environment):
    environment(GNNACCEL_BACKWARD="thread", GNNACCEL_CUDA_GRAPH="1")
    child = "import gnnaccel; gnnaccel.install()"
    code = f"{child}; gnnaccel.install(); import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr.splitlines() == [
        "gnnaccel: GNNACCEL_BACKWARD=thread is not understood: expected threads",
        "gnnaccel: GNNACCEL_CUDA_GRAPH is no variable of gnnaccel: did you mean GNNACCEL_CUDA_GRAPHS?",
    ]


@pytest.mark.parametrize("before", ["", "gnnaccel.install(); "])
def test_a_wrong_instruction_set_is_said_once_where_nothing_is_switched_on_too(environment, before):
    environment(GNNACCEL_ISA="AVX9")
    code = f"import gnnaccel; {before}gnnaccel.ops.spmm"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr == "gnnaccel: GNNACCEL_ISA=AVX9 is not understood: expected baseline, avx2 or avx512\n"
