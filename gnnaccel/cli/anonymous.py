"""What `doctor` found, as a report to show to others: no names of users or machines, no paths under a home."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import re
import socket
import sys
from pathlib import Path
from typing import Any

from gnnaccel import settings
from gnnaccel.cli import doctor, installing

_NEVER_A_NAME = 3  # shorter names are words: they are taken out of paths alone
_PACKAGES = ("numpy", "scipy", "torchdata", "pandas", "matplotlib")
_OTHERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")  # numbers, which say something about speed


def write(file: Path | None) -> int:
    """Write the report into a file, or print it: `doctor`'s exit code. Raises OSError."""
    found = report()
    text = json.dumps(found, indent=1)
    if file is None:
        print(text)
    else:
        file.write_text(text + "\n", encoding="utf-8")
        print(
            f"written to {file}, without names of users and machines and paths under a home: look before you share it"
        )
    return 0 if found["usable"] else 1


def report() -> dict[str, Any]:
    """What `doctor.examine` finds, with more versions and the variables that are set; anonymised."""
    found = doctor.examine()
    del found["python"]  # a path
    found["system"] = {
        "os": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_implementation(),
        "virtual_environment": sys.prefix != sys.base_prefix,
    }
    found["versions"] |= {name: doctor.version(name) for name in _PACKAGES}
    found["variables"] = variables()
    return anonymised(found)


def variables() -> dict[str, str]:
    """The variables that are set, of those that gnnaccel reads; of paths and misspelt values only that they are set."""
    ours = {}
    for name, allowed in settings.VALUES.items():
        if name in os.environ:
            is_plain = (allowed is not settings.ANY or name == "GNNACCEL") and not settings.complaint(name)
            ours[name] = os.environ[name] if is_plain else "set"
    return ours | {name: os.environ[name] for name in _OTHERS if name in os.environ}


def anonymised(found: Any) -> Any:
    """The same data, with what tells of a person or a machine replaced in every text."""
    if isinstance(found, dict):
        return {key: anonymised(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [anonymised(value) for value in found]
    return _without_names(found) if isinstance(found, str) else found


def _without_names(text: str) -> str:
    text = text.replace(sys.executable, "python").replace(sys.prefix, "<environment>")  # in commands to type
    if root := installing.clone():
        text = text.replace(str(root), "<clone>")
    rest = r"[^\s'\":;,)\]]*"  # of a path
    homes = [
        re.escape(os.path.expanduser("~").rstrip("/")) or "(?!)",  # (?!): nothing
        r"/(?:home|Users|users)/[^/\s'\":]+",
        r"[A-Za-z]:\\+Users\\+[^\\\s'\":]+",
    ]
    for home in homes:
        text = re.sub(rf"{home}(?![\w.-]){rest}", "<home>", text)
    for replacement, names in (("<host>", _hosts()), ("<user>", _users())):
        for name in sorted(names, key=len, reverse=True):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", replacement, text)
    return text


def _hosts() -> set[str]:
    full = {platform.node(), socket.gethostname()}
    return {name for one in full for name in (one, one.partition(".")[0]) if len(name) >= _NEVER_A_NAME} - {"localhost"}


def _users() -> set[str]:
    names = {os.path.basename(os.path.expanduser("~")), *map(os.environ.get, ("USER", "LOGNAME", "USERNAME"))}
    with contextlib.suppress(OSError, KeyError, ImportError):  # a user without a name, as in containers
        names.add(getpass.getuser())
    return {name for name in names if name and len(name) >= _NEVER_A_NAME}
