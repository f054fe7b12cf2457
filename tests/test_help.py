"""--help of every script and of every command says what there is, and raises nothing."""

import json
import os
import sys
from pathlib import Path

import forked
import pytest
import typer.main
from typer.testing import CliRunner

from gnnaccel.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
# In one process, which imports torch and the frameworks once. The scripts of a folder share modules; those of two have
# some of the same names.
ASK = """
import contextlib, io, json, os, runpy, sys, traceback
folder, scripts = sys.argv[1], sys.argv[2:]
sys.path.insert(0, folder)
said = {}
for script in scripts:
    sys.argv = [script, "--help"]
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as done:
        said[script] = out.getvalue() if done.code in (0, None) else f"left with {done.code}"
    except ModuleNotFoundError as error:
        said[script] = str(error) if os.path.exists(f"{error.name}.py") else "usage: unknown, a package is missing"
    except BaseException:
        said[script] = traceback.format_exc()
    else:
        said[script] = "did not stop"
print(json.dumps(said))
"""


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "scripts"])
def test_scripts(folder):
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / folder).glob("*.py")}
    scripts = sorted(str(path) for path, text in texts.items() if "ArgumentParser(" in text and "__main__" in text)
    assert scripts
    kept = {key: value for key, value in os.environ.items() if "GNNACCEL" not in key}
    words = [sys.executable, "-W", "ignore", "-c", ASK, str(ROOT / folder), *scripts]
    done = forked.run(words, kept | {"PYTHONPATH": str(ROOT), "GNNACCEL": "compat"}, ROOT / folder)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said.keys() == set(scripts)
    assert {Path(script).name: text for script, text in said.items() if "usage:" not in text} == {}


def test_commands():
    commands = typer.main.get_command(app).commands
    assert commands
    for words in ([], *([name] for name in commands)):
        done = CliRunner().invoke(app, [*words, "--help"])
        assert done.exit_code == 0 and "Usage:" in done.output, words
