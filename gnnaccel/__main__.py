"""``python -m gnnaccel [-v] [--profile] [--compat] script.py args...``: run a program accelerated, unmodified."""

from __future__ import annotations

import argparse
import builtins
import importlib.machinery
import io
import os
import runpy
import sys
import types

from gnnaccel import switch


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gnnaccel",
        description="Run a DGL or PyTorch Geometric program on gnnaccel's kernels. "
        "The same as GNNACCEL=1 python script.py",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is accelerated and what is not, and why")
    parser.add_argument("--profile", action="store_true", help="print a table of calls by kind at exit")
    parser.add_argument("--profile-json", metavar="FILE", help="write that table to FILE as JSON instead")
    parser.add_argument("--compat", action="store_true", help="accelerate nothing, only make DGL importable")
    parser.add_argument("-m", dest="module", metavar="module ...", nargs=argparse.REMAINDER, help="run a module")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="script.py ...", help="the script, its arguments")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the program that `argv` names as ``__main__``; its exceptions and exit codes are its own."""
    parser = _parser()
    options = parser.parse_args(argv)
    program = options.module if options.module is not None else options.program
    if not program:
        parser.print_usage(sys.stderr)
        print("gnnaccel: expected a script, or -m and a module", file=sys.stderr)
        return 2
    if options.profile_json and not _can_be_written(options.profile_json):
        print(
            f"gnnaccel: --profile-json: expected a file in a folder that is there, got {options.profile_json!r}",
            file=sys.stderr,
        )
        return 2
    if options.verbose:
        os.environ[switch.VERBOSE] = "1"
    if options.profile or options.profile_json:
        os.environ[switch.PROFILE] = os.path.abspath(options.profile_json) if options.profile_json else "1"
    switch.install(compat_only=options.compat)
    _hide_launcher()
    sys.argv[:] = program
    if options.module is not None:
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.getcwd()  # as python -m has it; the command's own folder is there else
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        _run_script(program[0])
    return 0


def _can_be_written(path: str) -> bool:
    """Whether a file can be made of `path`: asked before the program has run, which may be hours."""
    there = os.path.abspath(path)
    return os.access(os.path.dirname(there), os.W_OK) and not os.path.isdir(there)


def _run_script(path: str) -> None:
    """Run a script in a ``__main__`` of its own that stays for threads, pickles and worker processes."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path) or (not path.endswith((".py", ".pyw")) and os.path.isfile(path)):
        runpy.run_path(path, run_name="__main__")  # folders and archives that have a __main__.py, compiled files
        return
    try:
        with io.open_code(os.path.abspath(path)) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        print(f"gnnaccel: can't open file {path!r}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=path,
        __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
        __cached__=None,
    )
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _hide_launcher() -> None:
    """Leave the frames of this file and of runpy out of tracebacks: users see those of their program alone."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    show = sys.excepthook

    def excepthook(kind, value, trace):
        while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
            trace = trace.tb_next
        show(kind, value.with_traceback(trace), trace)

    sys.excepthook = excepthook


if __name__ == "__main__":
    sys.exit(main())
