"""Programs that the command line starts: each in a fresh Python, with acceleration on or off from its first line."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from gnnaccel import switch
from gnnaccel.dgl_backend.compat import KERNELS

_ROOT = Path(__file__).resolve().parent.parent.parent  # what has to be importable: holds the package's folder
_OURS = (switch.FLAG, switch.VERBOSE, switch.PROFILE, switch.GRAPHS, switch.MAIN_PID, KERNELS)


class Failed(Exception):
    """What the user asked for cannot be done here; the message says why and what would help. Exit code `code`."""

    def __init__(self, message: str, code: int = 1, last_line: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.last_line = last_line  # of what a child said: a Python program's own error


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without gnnaccel's switches, in which gnnaccel can be imported, and `extra`."""
    env = {key: value for key, value in os.environ.items() if key not in _OURS}
    if not switch_is_installed():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), env.get("PYTHONPATH"))))
    return env | extra


@functools.cache
def switch_is_installed() -> bool:
    """True if a Python started here with GNNACCEL=1 loads gnnaccel, as the .pth file of an installation does."""
    env = {key: value for key, value in os.environ.items() if key not in _OURS}
    code = "import sys; print('gnnaccel.switch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=env | {switch.FLAG: "1"}, capture_output=True, text=True)
    return done.stdout.strip() == "True"


def command(mode: str, profile: Path | None = None) -> tuple[list[str], dict[str, str]]:
    """How to start a script: the words before its path, and the environment.

    Parameters
    ----------
    mode : str
        "off": plain Python. "compat": DGL made importable, nothing else. "bridge": DGL's CPU build on CUDA graphs, on
        torch's kernels. "on": accelerated.
    profile : Path, optional
        File that gets the counters of an accelerated run.
    """
    if mode == "bridge":
        words, env = command("on")
        return words, env | {KERNELS: "torch"}
    if mode == "off":
        return [sys.executable], environment()
    if switch_is_installed():
        flags = {switch.FLAG: {"on": "1", "compat": "compat"}[mode]}
        return [sys.executable], environment(**flags, **({switch.PROFILE: str(profile)} if profile else {}))
    # A source folder on the path has no .pth file: the launcher does the same.
    options = ["--compat"] if mode == "compat" else []
    options += ["--profile-json", str(profile)] if profile else []
    return [sys.executable, "-m", "gnnaccel", *options], environment()


def run(
    words: Sequence[str], env: dict[str, str], what: str, on_line: Callable[[str], None] | None = None
) -> tuple[str, str]:
    """Run a child to its end, `on_line` being called with each line it prints: what it wrote to stdout and stderr.

    Raises
    ------
    Failed
        If it exits with an error; the message has its last lines.
    """
    printed: list[str] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:  # a full pipe would stall it
        process = subprocess.Popen(
            list(words), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
            encoding="utf-8", errors="replace",
        )  # fmt: skip
        try:
            assert process.stdout is not None
            for line in process.stdout:
                printed.append(line)
                if on_line:
                    on_line(line)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        errors.seek(0)
        complaints = errors.read()
    if code:
        how = f"with exit code {code}"
        if code < 0:
            how = f"by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
        said = complaints.strip() or "".join(printed).strip() or "(it printed nothing)"
        shown = said.splitlines()[-40:]
        raise Failed(f"{what} ended {how}:\n\n" + "\n".join(shown), last_line=shown[-1])
    return "".join(printed), complaints


def ask(question: str, *arguments: str, timeout: float = 120) -> dict:
    """What `gnnaccel.cli.probe` answers to `question`, in a process of its own; {"error": why} if that breaks."""
    words = [sys.executable, "-m", "gnnaccel.cli.probe", question, *arguments]
    try:
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout:.0f} s"}
    lines = done.stdout.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        complaints = done.stderr.strip().splitlines()
        return {"error": complaints[-1] if complaints else f"it ended with exit code {done.returncode}"}
