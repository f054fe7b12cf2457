"""Runs Python programs as forks of a process that has imported what they need, which takes longer than most of them.

python fork_server.py MODULE...: imports these, and reads as lines of JSON {"programs": [...], "timeout_s": ...}, each
program {"words", "environment", "folder", "out", "err"}: what stands behind the name of Python on a command line, all
of the environment, the current folder, the files for what is printed. Answers each line, when all of its programs have
ended, with the exit codes, as subprocess has them, or null where one had to be ended. GNNACCEL does what it does in a
process of its own, by the line of the .pth file.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import types
import warnings
from pathlib import Path

SWITCH = Path(__file__).resolve().parent.parent / "gnnaccel.pth"


def ended(started, timeout_s):
    """Waits for processes: exit codes, or None where the time was over."""
    codes, deadline, is_late = {}, time.monotonic() + timeout_s, False
    while len(codes) < len(started):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline and not is_late:
            is_late = True
            for left in set(started) - set(codes):
                os.kill(left, signal.SIGKILL)
        else:
            time.sleep(0.01)
    return None if is_late else [codes[pid] for pid in started]


def serve():
    """In each program's process what it is to be; None when there is nothing more to start."""
    for line in sys.stdin:
        job, started = json.loads(line), []
        for program in job["programs"]:
            started.append(os.fork())
            if not started[-1]:
                return program
        print(json.dumps(ended(started, job["timeout_s"])), flush=True)
    return None


def become(program):
    """What a new Python does before it runs the words: those of them that are left."""
    os.environ.clear()
    os.environ.update(program["environment"])
    os.chdir(program["folder"])
    for number, name in enumerate((os.devnull, program["out"], program["err"])):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    torch, threads = sys.modules.get("torch"), os.environ.get("OMP_NUM_THREADS")
    if torch is not None and threads:  # which was read when torch was imported
        torch.set_num_threads(int(threads))
    words = list(program["words"])
    while words[0] == "-W":
        warnings.simplefilter(words[1])
        sys.warnoptions.append(words[1])
        del words[:2]
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    if os.environ.get("GNNACCEL"):
        exec(SWITCH.read_text())
    return words


def run(words):
    """As `python WORDS` does."""
    if words[0] == "-m":
        sys.argv, words = words[1:], words[:2]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


own_folder = sys.path[0]
for name in sys.argv[1:]:
    importlib.import_module(name)
sys.path.remove(own_folder)
gc.collect()
gc.freeze()  # programs share these pages, and do not go through them when they end
if program := serve():
    run(become(program))
