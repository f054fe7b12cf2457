"""The `gnnaccel` command. This module imports the standard library alone: a command loads what it needs."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : list of str, optional
        Arguments after the program's name; default: those of this process.

    Returns
    -------
    int
        0: done. 1: it could not be done, and the message says why. 2: a wrong option. `run` gives 0, or lets
        the program's own exit code and exceptions through.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["run"]:
        arguments = ["run", *_set_apart(arguments[1:])]
    from gnnaccel.cli import app

    code, program = app.execute(arguments)
    if program is None:
        return code
    # Outside of typer, which would change how the program's exceptions are shown.
    from gnnaccel.__main__ import main as launch

    return launch(program)


def _set_apart(arguments: list[str]) -> list[str]:
    """Put "--" before the program, so that what follows is the program's and not read as options of ours."""
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word == "--":
            return arguments
        if word in ("-m", "-") or not word.startswith("-"):
            break
        at += 2 if word == "--profile-json" else 1
    return [*arguments[:at], "--", *arguments[at:]]
