"""Switching acceleration on and off: the flag, the import hook, and what is said at exit.

Nothing here imports torch, a framework or the binary before the program itself imports a framework. The hook
makes DGL importable before its import starts, and enables a backend when the import of its framework is done.

The environment variables are in gnnaccel/settings.py, and in docs/environment.md.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import os
import sys

from gnnaccel import settings

FLAG, VERBOSE, PROFILE, MAIN_PID = "GNNACCEL", "GNNACCEL_VERBOSE", "GNNACCEL_PROFILE", "_GNNACCEL_MAIN_PID"
GRAPHS = "GNNACCEL_CUDA_GRAPHS"
BACKENDS = {"dgl": "gnnaccel.dgl_backend", "torch_geometric": "gnnaccel.pyg_backend"}
NAMES = {"dgl": "DGL", "torch_geometric": "PyTorch Geometric"}


def parse_flag(value: str | None) -> str:
    """ "on", "off" or "compat".

    Raises
    ------
    ValueError
        For any other value.
    """
    word = (value or "").strip().lower()
    if word in settings.OFF:
        return "off"
    if word in settings.ON:
        return "on"
    if word == "compat":
        return "compat"
    raise ValueError(f"{FLAG}={value} is not understood: expected 1, 0 or compat")


class _State:
    """What is switched on in this process."""

    def __init__(self) -> None:
        self.hook: _Hook | None = None
        self.compat_only = False
        self.enabled: list[str] = []  # frameworks whose backend is enabled
        self.untried: set[str] = set()  # what was said to have a version that was never tried
        self.missing: set[str] = set()  # frameworks asked for, but not installed
        self.flag_before: str | None = None  # the environment's flag, put back by uninstall()
        self.complained = False  # virtual environments run .pth files twice
        self.awaits = False  # a module that is none of torch's
        self.leave_modules = lambda: None  # undoes what waits for one
        self.huge_pages = False  # torch's variable for them was set here
        self.observed_pid = 0  # process in which logging and the exit report were set up


_state = _State()


def _log():
    import logging  # not at the top: a Python start that only carries the flag does without

    return logging.getLogger("gnnaccel")


class _Loader:
    """Stands in for a framework's loader until its import starts, then steps aside and leaves no trace."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        if _state.hook is not None:
            _before_import(spec.name)  # here, as the framework is not in sys.modules yet
        return self._loader.create_module(spec)

    def exec_module(self, module):
        name = module.__spec__.name
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if _state.hook is not None:
            _after_import(name)


class _Hook:
    """The sys.meta_path finder: lets the others find a framework and wraps its loader."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in BACKENDS and fullname != "torch":
            return None
        for finder in sys.meta_path:
            find = None if isinstance(finder, _Hook) else getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:  # a folder without __init__.py has none: nothing to enable
                    spec.loader = _Loader(spec.loader)
                return spec
        if fullname in BACKENDS:
            _state.missing.add(fullname)
        return None


def _before_import(name: str) -> None:
    if name == "torch" and not _state.compat_only:
        try:
            _state.huge_pages |= importlib.import_module("gnnaccel.engine").ask_for_huge_pages()
        except Exception as error:
            _log().warning("gnnaccel: huge pages are not asked for: %s", error)
    if name != "dgl":
        return
    try:
        importlib.import_module(BACKENDS[name]).shim()
    except Exception as error:
        _log().warning("gnnaccel: could not prepare the import of DGL, it runs alone: %s", error)


def _await_modules() -> None:
    """Accelerate modules that gather and scatter with torch alone, from the first module on that is none of torch's:
    a process that builds none, as a compiler's, does not import gnnaccel."""
    module = sys.modules["torch"].nn.Module
    original = module.__init__

    @functools.wraps(original)
    def first(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if _state.awaits and type(self).__module__.partition(".")[0] != "torch":
            _state.awaits = False
            try:
                plain = importlib.import_module("gnnaccel.plain")
                plain.enable()
                plain.wait_for(self)
            except Exception as error:
                _log().warning("gnnaccel: modules of torch alone run without acceleration: %s", error)

    def leave() -> None:
        if module.__init__ is first:
            module.__init__ = original

    module.__init__ = first
    _state.awaits, _state.leave_modules = True, leave


def _after_import(name: str) -> None:
    if name == "dgl":  # wrong blocks are wrong whether or not anything is accelerated
        try:
            importlib.import_module(BACKENDS[name]).guard_sampling()
        except Exception as error:
            _log().warning("gnnaccel: DGL's sampling of int32 graphs could not be guarded: %s", error)
    if _state.compat_only or name in _state.enabled:
        return
    if name == "torch":
        _await_modules()
        return
    try:
        backend = importlib.import_module(BACKENDS[name])
    except Exception as error:
        _log().warning("gnnaccel: %s runs without acceleration: %s", NAMES[name], error)
        return
    try:
        backend.enable()
    except Exception as error:
        backend.disable()  # what had been patched before the failure
        _log().warning("gnnaccel: %s runs without acceleration: %s: %s", NAMES[name], type(error).__name__, error)
        return
    _state.enabled.append(name)
    if settings.is_on(GRAPHS):
        try:
            importlib.import_module("gnnaccel.capture.attaching").enable()
            _log().info("models on a GPU are captured in CUDA graphs")
        except Exception as error:
            _log().warning("gnnaccel: models are not captured in CUDA graphs: %s", error)
    versions = importlib.import_module("gnnaccel.versions")
    for of in ("Python", "torch", name):
        words = None if of in _state.untried else versions.untried(of)
        if words is not None:
            _state.untried.add(of)
            _log().warning("gnnaccel: %s", words)
    for lacking, words in importlib.import_module("gnnaccel.touch").MISSING.items():
        _log().warning("gnnaccel: this torch has no %s: %s", lacking, words)
    engine = importlib.import_module("gnnaccel.engine")
    engine.keep_memory()
    if (said := engine.settle()) is not None:
        _log().info(said)
    _log().info("%s %s is accelerated", NAMES[name], getattr(sys.modules[name], "__version__", ""))


def install(compat_only: bool = False) -> None:
    """Accelerate DGL and PyTorch Geometric in this process and in the worker processes it starts.

    Parameters
    ----------
    compat_only : bool
        Accelerate nothing, only make ``import dgl`` work with torch versions that its wheel does not know.

    Notes
    -----
    Call it before or after importing the frameworks: one that is imported already is accelerated at once, all of
    DGL, and of PyG the layers built from then on (`gnnaccel.accelerate` takes existing models). Calling again
    changes nothing, except that full acceleration can follow `compat_only`. Worker processes inherit it through
    the environment variable ``GNNACCEL``, which is set here. A framework that is not installed is no error.
    A backend that cannot be enabled logs a warning, and the framework runs alone.
    """
    if _state.hook is None:
        _state.hook = _Hook()
        _state.compat_only = compat_only
        sys.meta_path.insert(0, _state.hook)
        _state.flag_before = os.environ.get(FLAG)
        _complain()
    elif compat_only or not _state.compat_only:
        return
    _state.compat_only = compat_only
    os.environ[FLAG] = "compat" if compat_only else "1"
    _observe()
    if "torch" in sys.modules:
        _before_import("torch")  # in time where it has made no tensor
    for name in ("torch", *BACKENDS):
        if name in sys.modules:
            _after_import(name)


def uninstall() -> None:
    """Undo `install`: frameworks run on their own code again, and worker processes start without the flag.

    What made DGL usable stays in place: the import of its wheel, and right blocks from its int32 sampling.
    """
    if _state.hook is None:
        return
    if _state.hook in sys.meta_path:
        sys.meta_path.remove(_state.hook)
    _state.hook = None
    _state.awaits = False
    if "gnnaccel.plain" in sys.modules:
        sys.modules["gnnaccel.plain"].disable()
    _state.leave_modules()
    for name in _state.enabled:
        importlib.import_module(BACKENDS[name]).disable()
    if _state.enabled:
        importlib.import_module("gnnaccel.engine").restore()
        if "gnnaccel.capture.attaching" in sys.modules:
            sys.modules["gnnaccel.capture.attaching"].disable()
    _state.enabled.clear()
    if _state.huge_pages:  # torch has read it: this is for processes that are started from now on
        os.environ.pop(sys.modules["gnnaccel.engine"].HUGE_PAGES, None)
        _state.huge_pages = False
    # Under the flag itself there is nothing to go back to but off.
    before = _state.flag_before
    if before is None or parse_or_off(before) != "off":
        os.environ.pop(FLAG, None)
    else:
        os.environ[FLAG] = before


def enabled() -> list[str]:
    """The frameworks that are accelerated in this process."""
    return list(_state.enabled)


def parse_or_off(value: str | None) -> str:
    """`parse_flag`, with "off" for what it does not understand."""
    try:
        return parse_flag(value)
    except ValueError:
        return "off"


def activate() -> None:
    """What the .pth file calls in a Python started with the flag. Prints one line instead of raising."""
    try:
        mode = parse_flag(os.environ.get(FLAG))
        if mode != "off":
            install(compat_only=mode == "compat")
    except Exception as error:
        if not _state.complained:
            print(f"gnnaccel: stays off: {error}", file=sys.stderr)
        _state.complained = True


def _complain() -> None:
    """Say what the environment has that is not understood: once, not in each worker process."""
    if settings.CHECKED in os.environ:
        return
    os.environ[settings.CHECKED] = "1"
    for complaint in settings.complaints():
        _log().warning("gnnaccel: %s", complaint)


def _observe() -> None:
    """Set up logging, timing and the exit report, as the environment asks for."""
    verbose, profile = settings.is_on(VERBOSE), settings.is_on(PROFILE)
    if not (verbose or profile) or _state.observed_pid:
        return
    import logging

    from gnnaccel import report

    _state.observed_pid = os.getpid()
    os.environ.setdefault(MAIN_PID, str(os.getpid()))
    report.time_calls(profile)
    if verbose:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[gnnaccel] %(message)s"))
        log = logging.getLogger("gnnaccel")
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    atexit.register(_at_exit)


def _is_worker() -> bool:
    """True in a process that multiprocessing made, by fork or by spawn, or its helpers."""
    if os.getpid() != _state.observed_pid:
        return True
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return True
    return any("from multiprocessing." in word for word in sys.orig_argv)


def _is_spawned_rank() -> bool:
    """True in a process that torch.multiprocessing.spawn has started."""
    multiprocessing = sys.modules.get("multiprocessing")
    target = None if multiprocessing is None else getattr(multiprocessing.current_process(), "_target", None)
    return getattr(target, "__module__", None) == "torch.multiprocessing.spawn"


def _at_exit() -> None:
    from gnnaccel import report

    is_first = os.environ.get(MAIN_PID) == str(os.getpid())
    # Other Python programs that the first one starts (torchrun's ranks, compilers) speak up if they ran our kernels.
    # So do ranks of torch.multiprocessing.spawn, which are trainers; workers of loaders do not.
    if (_is_worker() and not _is_spawned_rank()) or not (is_first or report.snapshot()):
        return
    if message := _nothing_happened():
        _log().info(message)
    if not settings.is_on(PROFILE):
        return
    target = os.environ[PROFILE].strip()
    if target.lower() in settings.ON:
        print(f"gnnaccel: {message}" if message else report.table(), file=sys.stderr)
        return
    try:
        report.save(target)
    except OSError as error:
        print(f"gnnaccel: the profile could not be written: {error}", file=sys.stderr)


def _nothing_happened() -> str | None:
    """Why there was nothing to accelerate, or None if a framework was imported for it."""
    if _state.compat_only:
        return "compat: nothing is accelerated, and nothing is counted"
    if any(name in sys.modules for name in BACKENDS) or sys.modules["gnnaccel.report"].snapshot():
        return None
    if "torch.distributed.run" in sys.modules:
        return "torchrun ran the ranks, which print tables of their own"
    message = "the program imported neither DGL nor PyTorch Geometric: nothing to accelerate"
    if _state.missing:
        message += f" (not installed: {', '.join(sorted(_state.missing))})"
    return message
