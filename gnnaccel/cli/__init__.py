"""The `gnnaccel` command. This module imports the standard library alone: a command loads what it needs."""

from __future__ import annotations

import runpy
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
    from gnnaccel import __main__ as launcher

    _show_the_program_alone(launcher.__file__)
    return launcher.main(program)


def _show_the_program_alone(launcher: str) -> None:
    """Leave what is on the stack above the launcher out of the tracebacks of the program; it hides its own frames."""
    show = sys.excepthook

    def excepthook(kind, value, trace):
        start = trace
        while start is not None and start.tb_frame.f_code.co_filename != launcher:
            start = start.tb_next
        while start is not None and start.tb_next is not None and start.tb_frame.f_code.co_filename in hidden:
            start = start.tb_next
        show(kind, value.with_traceback(start or trace), start or trace)

    hidden = {launcher, runpy.__file__, "<frozen runpy>"}
    sys.excepthook = excepthook


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
