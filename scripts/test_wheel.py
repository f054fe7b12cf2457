"""Installs a built wheel into fresh environments, one for each torch, and runs the quickstarts in them.

    python scripts/test_wheel.py dist/*.whl                                   # the torch versions that can be had
    python scripts/test_wheel.py dist/*.whl --torch 2.4.1 2.13.0 --frameworks pyg --folder /tmp/wheels

The kernels know nothing of torch, so one wheel has to serve all. A version of torch of which the registry has no CPU
build is skipped, and named at the end: PyPI's own builds for Linux are CUDA's, of gigabytes (--large takes them).
Exits with 1 if any environment failed, or none could be made.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from urllib import request

ROOT = Path(__file__).resolve().parent.parent
TORCH = ("2.4.1", "2.6.0", "2.8.0", "2.10.0", "2.13.0")
CPU_INDEX = os.environ.get("CPU_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
FRAMEWORKS = ("pyg", "dgl")
LOSSES_WITHIN = 1e-3  # of two runs of ten epochs, alone and accelerated


class Failed(Exception):
    """A step that went wrong, with what it printed."""


class NotThere(Exception):
    """The registry does not have this torch without CUDA."""


def run(*words, cwd=None, **environment):
    """What a command printed. Failed if it ends with an error."""
    kept = {key: value for key, value in os.environ.items() if "GNNACCEL" not in key and key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env=kept | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise Failed(f"$ {' '.join(map(str, words))}\n{done.stdout[-4000:]}")
    return done.stdout


def quickstart(name):
    """The program on a page of the documentation."""
    page = (ROOT / "docs" / f"quickstart-{name}.md").read_text("utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return program


def wanted(pip, version, large, extra):
    """The words with which pip installs this torch: its CPU build if there is one. NotThere otherwise."""
    words = [f"torch=={version}+cpu", *extra]
    try:  # of a version that there is not pip fetches nothing
        run(*pip, "install", "-q", "--dry-run", "--no-deps", "--ignore-installed", *words)
    except Failed as error:
        if not large:
            said = next((line for line in str(error).splitlines() if "ERROR" in line), "")
            raise NotThere(f"the registry has no CPU build of it, and --large was not said ({said})") from None
        words[0] = f"torch=={version}"
    return words


def reached(url):
    """True if something answers there."""
    try:
        return request.urlopen(url, timeout=10).status == 200
    except OSError:
        return False


def losses(printed):
    """What a quickstart printed as the loss of each epoch."""
    return [float(loss) for loss in re.findall(r"loss (\S+)", printed)]


def check_framework(python, name, folder):
    """Runs the framework's quickstart alone and with the flag: what ran accelerated, in words. Raises Failed."""
    alone = {"GNNACCEL": "compat"} if name == "dgl" else {}
    program = f"train_{name}.py"  # dgl.py would be what it imports
    (folder / program).write_text(quickstart(name), encoding="utf-8")
    counts = folder / f"{name}.json"
    expected = losses(run(python, program, cwd=folder, **alone))
    found = losses(run(python, program, cwd=folder, GNNACCEL="1", GNNACCEL_PROFILE=str(counts)))
    if len(found) != 10 or max(abs(a - b) for a, b in zip(expected, found, strict=True)) > LOSSES_WITHIN:
        raise Failed(f"{name}: the losses are {found}, alone {expected}")
    sites = json.loads(counts.read_text())["sites"].values()
    done, left = (sum(site[key] for site in sites) for key in ("accelerated", "left"))
    if not done:
        raise Failed(f"{name}: no call was accelerated: {counts.read_text()}")
    return f"{name}: {done} calls accelerated, {left} left"


def check(wheel, version, frameworks, folder, large, extra):
    """One environment: what was seen in it, in words. Raises Failed or NotThere."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    torch = wanted(pip, version, large, extra)
    run(*pip, "install", "-q", *torch)
    extras = f"[{','.join(frameworks)}]" if frameworks else ""
    run(*pip, "install", "-q", f"{wheel}{extras}", *torch)  # torch again: no framework may exchange it
    seen = run(python, "-c", "import torch; print(torch.__version__)").strip()
    run(python, "-c", "import gnnaccel, torch; g = gnnaccel.as_graph(torch.tensor([[0, 1, 1], [1, 0, 2]])); "
        "assert gnnaccel.ops.spmm(g, torch.eye(3)).sum() == 3", cwd=folder)  # fmt: skip
    said = [check_framework(python, name, folder) for name in frameworks]
    if frameworks:
        doctor = json.loads(run(folder / "bin" / "gnnaccel", "doctor", "--json", cwd=folder))
        if not doctor["switch"]["installed"]:
            raise Failed("the flag's .pth file has no effect in this environment")
        said.append("doctor: ready")
    if "pyg" in frameworks:
        run(folder / "bin" / "gnnaccel", "compare", "--framework", "pyg", "--epochs", "4", "--repeats", "1", cwd=folder)
        said.append("compare ran")
    return f"torch {seen}: {'; '.join(said)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="of this Python")
    parser.add_argument("--torch", nargs="+", default=TORCH, metavar="VERSION", help=f"default: {' '.join(TORCH)}")
    parser.add_argument("--frameworks", nargs="*", default=FRAMEWORKS, choices=FRAMEWORKS)
    parser.add_argument("--large", action="store_true", help="also take builds of torch with CUDA: gigabytes")
    parser.add_argument(
        "--folder", type=Path, help="where the environments are made, and stay; default: a temporary one"
    )
    args = parser.parse_args()
    extra = ["--extra-index-url", CPU_INDEX] if CPU_INDEX and reached(f"{CPU_INDEX}/torch/") else []
    kept = (args.folder or Path(tempfile.mkdtemp(prefix="gnnaccel-wheel-"))).resolve()
    said, failed, done = [], False, False
    try:
        for version in args.torch:
            print(f"== {args.wheel.name} with torch {version}", flush=True)
            try:
                said.append(check(args.wheel.resolve(), version, args.frameworks, kept / version, args.large, extra))
                done = True
            except NotThere as why:
                said.append(f"torch {version}: SKIPPED: {why}")
            except Failed as error:
                print(error)
                said.append(f"torch {version}: FAILED")
                failed = True
            print(said[-1], flush=True)
            if not args.folder:
                shutil.rmtree(kept / version, ignore_errors=True)
    finally:
        if not args.folder:
            shutil.rmtree(kept, ignore_errors=True)
    print("\n" + "\n".join(said))
    return int(failed or not done)


if __name__ == "__main__":
    sys.exit(main())
