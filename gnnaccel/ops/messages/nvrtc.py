"""Compiles CUDA C++ at run time with NVRTC, which torch's CUDA builds bring, and launches what came out.

Compiled once for each source and GPU: kept in memory, and on disk in the user's cache folder, in files that say what
they are of and carry a checksum. Knows no graphs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import hashlib
import importlib.util
import logging
import os
import re
from pathlib import Path

import torch

from gnnaccel.graph import files, store
from gnnaccel.lower import bounds

DUMP = "GNNACCEL_DUMP_MESSAGES"  # a folder for sources
_OPTIONS = ("--std=c++17",)
_MAGIC = b"gnnaccel kernel 1\n"
_NOT_ENTERED = (201, 400)  # CUDA_ERROR_INVALID_CONTEXT, and _HANDLE: of another context
_log = logging.getLogger("gnnaccel")


class Missing(RuntimeError):
    """NVRTC or the driver cannot be used here; says why."""


class Failed(RuntimeError):
    """A source that does not compile, or a kernel that does not load or start; says why."""


def _candidates() -> list[str]:
    """Where NVRTC may be: in this process already, in a wheel, in a toolkit, on the loader's path."""
    found: list[str] = []
    try:
        with open("/proc/self/maps") as maps:
            found += re.findall(r"(/\S*/libnvrtc\.so\S*)", maps.read())
    except OSError:
        pass
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        found += sorted(glob.glob(os.path.join(folder, "*", "lib", "libnvrtc.so.*")), reverse=True)
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root:
            found += sorted(glob.glob(os.path.join(root, "lib64", "libnvrtc.so.*")))
    major = (torch.version.cuda or "").partition(".")[0]
    found.sort(key=lambda path: f".so.{major}" not in path)  # torch's own first: the driver can load what it makes
    return [*dict.fromkeys(found), *([f"libnvrtc.so.{major}"] if major else []), "libnvrtc.so"]


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The library. Raises Missing."""
    reasons = []
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            reasons.append(str(error))
    raise Missing(f"NVRTC was not found ({reasons[-1] if reasons else 'no library of that name'})")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Missing(f"the CUDA driver was not found ({error})") from error


@functools.cache
def version() -> tuple[int, int]:
    """NVRTC's. Raises Missing."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _checked(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


@functools.cache
def obstacle() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    try:
        version()
        _driver()
    except (Missing, Failed) as error:
        return str(error)
    return None


@functools.cache
def architectures() -> tuple[int, ...]:
    """Those that NVRTC compiles for, 90 for compute capability 9.0. Raises Missing."""
    count = ctypes.c_int()
    _checked(_nvrtc().nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
    found = (ctypes.c_int * count.value)()
    _checked(_nvrtc().nvrtcGetSupportedArchs(found), "nvrtcGetSupportedArchs")
    return tuple(sorted(found))


def target(capability: tuple[int, int]) -> str:
    """The architecture to compile for: "sm_90", or of a GPU that NVRTC does not know yet the newest one before it,
    "compute_90", from which the driver makes machine code. Raises Missing for a GPU that is too old."""
    number, known = 10 * capability[0] + capability[1], architectures()
    if number in known:
        return f"sm_{number}"
    older = [arch for arch in known if arch < number]
    if not older:
        raise Missing(
            f"NVRTC {'.'.join(map(str, version()))} compiles for sm_{known[0]} and later, not for sm_{number}"
        )
    return f"compute_{older[-1]}"


def obstacle_of_gpus() -> str | None:
    """Why nothing can be compiled for one of the GPUs of this process; None if it can for all."""
    why = obstacle()
    try:
        for device in range(torch.cuda.device_count() if why is None else 0):
            target(torch.cuda.get_device_capability(device))
    except (Missing, Failed) as error:
        return str(error)
    return why


def described() -> dict:
    """For `gnnaccel doctor`: NVRTC's version or why it cannot be used, and where machine code is kept."""
    why = obstacle()
    try:
        where = str(folder())
    except ImportError as error:
        where = f"nowhere ({error})"
    return {"nvrtc": None if why else ".".join(map(str, version())), "why": why, "folder": where}


def _checked(status: int, what: str) -> None:
    if status:
        _nvrtc().nvrtcGetErrorString.restype = ctypes.c_char_p
        raise Failed(f"{what}: {_nvrtc().nvrtcGetErrorString(status).decode()}")


def compiled(source: str, capability: tuple[int, int]) -> bytes:
    """The machine code of a source for GPUs of a compute capability, or PTX of it (`target`).

    Raises
    ------
    Missing
        Without NVRTC, or one for such GPUs. Failed: with the compiler's words, for a source that does not compile.
    """
    library, program, architecture = _nvrtc(), ctypes.c_void_p(), target(capability)
    made = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"gnnaccel.cu", 0, None, None)
    _checked(made, "nvrtcCreateProgram")
    try:
        options = (*_OPTIONS, f"--gpu-architecture={architecture}")
        given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        status = library.nvrtcCompileProgram(program, len(options), given)
        if status:
            size = ctypes.c_size_t()
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            words = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, words)
            _checked(status, f"nvrtcCompileProgram: {words.value.decode(errors='replace')}")
        size, kind = ctypes.c_size_t(), "CUBIN" if architecture.startswith("sm_") else "PTX"
        _checked(library[f"nvrtcGet{kind}Size"](program, ctypes.byref(size)), f"nvrtcGet{kind}Size")
        code = ctypes.create_string_buffer(size.value)
        _checked(library[f"nvrtcGet{kind}"](program, code), f"nvrtcGet{kind}")
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def folder() -> Path:
    """Where machine code is kept."""
    import platformdirs  # here alone: most processes compile nothing

    return Path(platformdirs.user_cache_dir("gnnaccel")) / "kernels"


def key_of(source: str, capability: tuple[int, int]) -> str:
    """Names all that machine code depends on."""
    words = (source, str(capability), str(version()), " ".join(_OPTIONS))
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def _kept(path: Path, key: str) -> bytes | None:
    """The machine code in a file; None if there is none, or another's, or a damaged one. A checksum is no signature:
    code that another user may have written is not run."""
    try:
        content = files.content(path, bounds.KERNEL_FILE_BYTES, trusted=True)
    except OSError:
        return None
    except ValueError as error:
        _log.warning("%s is not used: %s", path, error)
        return None
    head = _MAGIC + key.encode() + b"\n"
    digest, code = content[len(head) : len(head) + 32], content[len(head) + 32 :]
    if not content.startswith(head) or hashlib.sha256(code).digest() != digest:
        _log.warning("%s is damaged or of another kernel: it is not used, and written anew", path)
        return None
    return code


def code_of(source: str, capability: tuple[int, int]) -> bytes:
    """`compiled`, from the user's cache if it is there, which keeps the files used last; a folder that cannot be
    written is none."""
    key = key_of(source, capability)
    try:
        path = folder() / f"{key}.cubin"
    except ImportError as error:
        _log.debug("%s: kernels are compiled again in each process", error)
        return compiled(source, capability)
    code = _kept(path, key)
    if code is not None:
        with contextlib.suppress(OSError):
            os.utime(path)
    else:
        code = compiled(source, capability)
        try:
            store.write(path, _MAGIC + key.encode() + b"\n" + hashlib.sha256(code).digest() + code)
            _drop_oldest(path.parent)
        except OSError as error:
            _log.debug("%s cannot be written (%s): kernels are compiled again in each process", path, error)
    return code


def _drop_oldest(place: Path) -> None:
    """Keep the files used last. Another process may do the same at the same time."""
    found = list(place.glob("*.cubin"))
    if len(found) <= bounds.KERNEL_FILES:
        return
    used: dict[Path, float] = {}
    for path in found:
        with contextlib.suppress(FileNotFoundError):
            used[path] = path.stat().st_mtime
    for path in sorted(used, key=used.__getitem__)[: len(used) - bounds.KERNEL_FILES * 3 // 4]:
        path.unlink(missing_ok=True)


def dump(source: str) -> None:
    """Write a source into the folder that GNNACCEL_DUMP_MESSAGES names, if it does."""
    place = os.environ.get(DUMP)
    if place:
        store.write(Path(place) / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.cu", source.encode())


class Module:
    """Kernels of one source on one GPU. Never unloaded: a CUDA graph may hold on to them.

    Raises Missing, or Failed.
    """

    def __init__(self, source: str, device: int):
        dump(source)
        self._driver = _driver()
        code = code_of(source, torch.cuda.get_device_capability(device))
        self._code = ctypes.create_string_buffer(code, len(code))
        self._module, self._context, gpu = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        with torch.cuda.device(device):
            self._check(self._driver.cuDeviceGet(ctypes.byref(gpu), device), "cuDeviceGet")
            retained = self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), gpu)
            self._check(retained, "cuDevicePrimaryCtxRetain")
            self.enter()
            self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), self._code), "cuModuleLoadData")

    def enter(self) -> None:
        """Make the GPU's context that of this thread. A thread has none, whatever torch's current device, until it has
        called CUDA's runtime for more than that: a new one, or one of autograd's that has found its memory ready."""
        self._check(self._driver.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    def _check(self, status: int, what: str) -> None:
        if status:
            words = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(words))
            raise Failed(f"{what}: {(words.value or b'unknown error').decode()}")

    def kernel(self, name: str) -> Kernel:
        """The kernel of that name."""
        function = ctypes.c_void_p()
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()), name)
        return Kernel(self, function, name)


class Kernel:
    """A kernel whose one argument is a struct of 64-bit words."""

    def __init__(self, module: Module, function: ctypes.c_void_p, name: str):
        self._module, self._function, self._name = module, function, name
        self._launch = module._driver.cuLaunchKernel

    def __call__(self, grid: tuple[int, int], threads: int, words: ctypes.Array, stream: int) -> None:
        """Start it on a stream of the current device. words : the struct, read before this returns."""
        given = (ctypes.c_void_p * 1)(ctypes.addressof(words))
        launch = (self._function, grid[0], grid[1], 1, threads, 1, 1, 0, ctypes.c_void_p(stream), given, None)
        status = self._launch(*launch)
        if status in _NOT_ENTERED:
            self._module.enter()
            status = self._launch(*launch)
        if status:
            self._module._check(status, self._name)
