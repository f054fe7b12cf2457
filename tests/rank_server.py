"""Starts ranks as forks of a process that has imported what they need, which takes longer than most of them run.

Reads {"ranks": [[words, environment, file for the output], ...], "timeout_s": ...} as lines of JSON. Answers each line
with the exit codes, as subprocess has them, or null where a rank had to be ended.
"""

import gc
import json
import os
import runpy
import signal
import sys
import time

import fault_ranks  # noqa: F401 - with what it imports, and part_ranks


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
    """In each rank's process what it is to be; None when there is nothing more to start."""
    for line in sys.stdin:
        job, started = json.loads(line), []
        for rank in job["ranks"]:
            started.append(os.fork())
            if not started[-1]:
                return rank
        print(json.dumps(ended(started, job["timeout_s"])), flush=True)
    return None


gc.freeze()  # ranks share these pages, and do not go through them when they end
if rank := serve():
    sys.argv, environment, output = rank
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    runpy.run_path(sys.argv[0], run_name="__main__")
