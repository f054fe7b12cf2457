"""The programs of the quickstarts run, alone and with the flag, with the same losses and every call accelerated."""

import functools
import json
import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
try:
    import test_wheel as wheels
finally:
    sys.path.pop(0)


@pytest.mark.parametrize(
    ("name", "package", "alone"), [("pyg", "torch_geometric", ()), ("dgl", "dgl", ("-m", "gnnaccel", "--compat"))]
)
def test_quickstart(name, package, alone, tmp_path):
    if util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (tmp_path / "train.py").write_text(wheels.quickstart(name), encoding="utf-8")
    kept = {key: value for key, value in os.environ.items() if "GNNACCEL" not in key} | {"PYTHONPATH": str(ROOT)}

    def losses(run, *options):
        done = run([sys.executable, *options, "train.py"], env=kept, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return wheels.losses(done.stdout)

    as_users_do = functools.partial(subprocess.run, capture_output=True, text=True)
    found = losses(as_users_do, "-m", "gnnaccel", "--profile-json", "counts.json")
    assert len(found) == 10 and found == pytest.approx(losses(forked.run, *alone), abs=wheels.LOSSES_WITHIN)
    (site,) = json.loads((tmp_path / "counts.json").read_text())["sites"].values()
    assert (site["accelerated"], site["left"]) == (20, 0)
