"""The CUDA kernels on a machine without a GPU: compiled for the CPU, run thread by thread (include/cuda_runtime.h).

    python tests/emulation/emulate.py [--no-address-sanitizer] [pytest's arguments]

Builds build/emulated/_emulated.so from cuda/ with the undefined-behaviour and address sanitizers, then runs tests of
CUDA with it: tensors stay on the CPU and pass for CUDA ones, and `launch` calls the emulated entries. Undefined
behaviour ends the process without a word: calls that would describe it take a fifth of the compiler's time. What this
cannot see: races, occupancy, speed, and the libraries (its sort is a sort of the standard library).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "emulated"
SWITCH = BUILD / "switch.o"
QUICK = ("-std=c++17", "-O0", "-w", "-fPIC")  # for what tests generate
_PRELOADED = ("libasan.so", "libstdc++.so")
EMULATED = "GNNACCEL_EMULATE"  # in the environment: what to load
ON_ANY_DEVICE = (
    *("pairs_out_of_range", "pairs_by_ascending_rows", "sorts_of_pairs", "the_first_calls_on_a_graph"),
    *("same_bits_on_every_run", "atomic_path_is_close"),
)
TESTS = (
    "tests/test_cuda_ops.py",
    "tests/test_cuda_few_features.py",
    "tests/test_cuda_finished_sums.py",
    "tests/test_cuda_lists.py",
    "tests/test_cuda_tiles.py",
    "tests/test_cuda_maxk.py",
    "tests/test_cuda_messages.py",
    "tests/test_cuda_numbering.py",
    "tests/test_cuda_sampling.py",
    "tests/test_cuda_sampling_kinds.py",
    "tests/test_cuda_packed.py",
    "tests/test_cuda_products.py",
    "tests/test_cuda_pyg_sampling.py",
    "tests/test_cuda_pyg_subgraphs.py",
    "tests/test_cuda_relations.py::test_layer_with_own_features",
    "tests/test_cuda_relations.py::test_segment_matmul_with_gradients",
    *(f"tests/test_cuda_runtime.py::test_{name}" for name in ON_ANY_DEVICE),
    # torch.utils.checkpoint asks CUDA for the state of its random numbers; a million rows take too long.
    "--deselect=tests/test_cuda_lists.py::test_checkpointing_while_a_list_is_earned",
    "--deselect=tests/test_cuda_lists.py::test_many_short_rows",
)

_LAUNCH = re.compile(r"^([ ]*)([a-z_]+<[^;{}]*?>|[a-z_]+)\s*<<<(.*?)>>>\(", re.S | re.M)
_MULTIPLY_ADD = re.compile(r'asm\("mad\.wide.*?\);', re.S)
_MATRIX = re.compile(r'asm\("mma\.sync\.aligned\.m16n8k8\..*?\);', re.S)
_MATRIX_16 = re.compile(r'asm\("mma\.sync\.aligned\.m16n8k16\..*?\);', re.S)
_SHARED = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")
_ROUND = re.compile(r'asm\("cvt\.rna\.tf32.*?\);', re.S)
_COPY_AHEAD = re.compile(r'asm volatile\(\s*"cp\.async\.cg\..*?\);', re.S)
_COPIES = re.compile(r'asm volatile\(\s*"cp\.async\.(?:commit|wait)_.*?\);', re.S)
_PLAIN_MULTIPLY_ADD = "address = base + static_cast<uint64_t>(static_cast<uint32_t>(row)) * static_cast<uint32_t>(len);"


def convert(source: str) -> str:
    """A file of cuda/ as C++: launches become calls, and the lines of assembly what they stand for."""

    def call(found: re.Match) -> str:
        indent, kernel, configuration = found.groups()
        if "<" not in kernel:  # its template arguments follow from what it is given
            kernel = f"[&](auto... given) {{ {kernel}(given...); }}"
        return f"{indent}emulation::launch(emulation::Configuration({configuration}), {kernel}, "

    source = _LAUNCH.sub(call, source)
    if "<<<" in source:
        raise SystemExit("emulate.py does not understand a kernel launch: " + source.partition("<<<")[2][:80])
    source = _MATRIX.sub("emulation::multiply_add(d, a, b0, b1);", source)
    source = _MATRIX_16.sub("emulation::multiply_add_16<T>(d, a, b0, b1);", source)
    source = _SHARED.sub(r"__shared__ \1 \2[131072 / sizeof(\1)];", source)  # the most that a kernel asks for
    source = _COPY_AHEAD.sub("emulation::copy_ahead(to, from, bytes);", source)
    source = _COPIES.sub(";", source)
    source = _ROUND.sub("rounded = emulation::to_tf32(value);", source)
    return _MULTIPLY_ADD.sub(_PLAIN_MULTIPLY_ADD, source)


def _write(path: Path, text: str) -> None:
    """Leave a file alone that says so already: what is made of it stays new enough."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def with_header(flags: Sequence[str]) -> list[str]:
    """Flags of g++ that begin a unit with CUDA's header, which is compiled once for all that have the same flags."""
    folder, include = BUILD / hashlib.sha256(" ".join(flags).encode()).hexdigest()[:12], HERE / "include"
    header, made = folder / "first.h", folder / "first.h.gch"
    flags = [*flags, f"-I{include}"]
    if not made.exists() or made.stat().st_mtime < max(path.stat().st_mtime for path in include.glob("*.h")):
        folder.mkdir(parents=True, exist_ok=True)
        header.write_text('#include "cuda_runtime.h"\n')
        part = folder / f"{os.getpid()}.part"
        subprocess.run(["g++", *flags, "-x", "c++-header", str(header), "-o", str(part)], check=True)
        part.rename(made)
    return [*flags, "-include", str(header)]


def build(address_sanitizer: bool) -> Path:
    """The module; what has not changed is not compiled again."""
    made = BUILD / "cuda"
    objects = BUILD / ("objects_asan" if address_sanitizer else "objects")
    for folder in (made, BUILD / "cpp", objects):
        folder.mkdir(parents=True, exist_ok=True)
    headers, units = (
        [BUILD / "cpp" / name for name in ("types.h", "message_program.h", "kernels.h", "bindings.h")],
        [HERE / "module.cpp"],
    )
    for header in headers:
        _write(header, (ROOT / "cpp" / header.name).read_text())
    for path in sorted((ROOT / "cuda").glob("*")):
        if path.suffix in (".cu", ".cuh", ".h", ".cpp"):
            target = made / (path.stem + ".cpp" if path.suffix == ".cu" else path.name)
            _write(target, convert(path.read_text()))
            (units if target.suffix == ".cpp" else headers).append(target)
    _write(made / "walk_source.h", 'constexpr char kWalkSource[] = "";\n')  # `pretend` reads the file
    headers += [path for path in (HERE / "include").rglob("*") if path.is_file()]
    newest_header = max(path.stat().st_mtime for path in headers)
    import pybind11

    includes = [f"-I{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))]
    checks = "-fsanitize=undefined" + (",address" if address_sanitizer else "")
    flags = [
        "-std=c++17",
        "-Og",
        "-g1",
        "-w",
        "-fPIC",
        checks,
        "-fno-sanitize=vptr",
        "-fsanitize-undefined-trap-on-error",
    ]
    flags = with_header(flags)
    with_header(QUICK)
    subprocess.run(["gcc", "-c", str(HERE / "switch.S"), "-o", str(SWITCH)], check=True)

    def compile_one(unit: Path) -> Path:
        target = objects / (unit.stem + ".o")
        if not target.exists() or target.stat().st_mtime < max(unit.stat().st_mtime, newest_header):
            subprocess.run(["g++", *flags, *includes, "-c", str(unit), "-o", str(target)], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(compile_one, units))
    module = BUILD / ("_emulated_asan.so" if address_sanitizer else "_emulated.so")
    if not module.exists() or module.stat().st_mtime < max(part.stat().st_mtime for part in parts):
        subprocess.run(["g++", "-shared", checks, *map(str, parts), str(SWITCH), "-o", str(module)], check=True)
    return module


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_emulated", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pretend(module: ModuleType) -> None:
    """Let tensors on the CPU pass for CUDA ones in this process, from here on."""
    import torch

    import gnnaccel.ops  # noqa: F401
    from gnnaccel import _library
    from gnnaccel.ops.messages import generated, nvrtc

    on_the_cpu = _library.launch

    def launch(name: str, device, *args):
        entry = getattr(module, name + "_cuda", None)
        return on_the_cpu(name, device, *args) if entry is None else entry(*args, 0)

    def entry(name: str, device):
        """Calls made ready end with a number of threads where no GPU is named."""
        return lambda *given: launch(name, device, *given[:-1])

    module.use_memory(lambda size: torch.empty(size, dtype=torch.uint8))
    _library.launch, _library.entry = launch, entry
    _library.has_cuda_kernels = lambda: True
    _library.walk_source = lambda: (ROOT / "cuda" / "walk.cuh").read_text()
    _library.on_stream = lambda device, start, *args: start(*args, 0)
    generated.obstacle = nvrtc.obstacle = lambda: None
    nvrtc.Module = Generated
    torch.cuda.current_device = lambda: 0
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.current_stream = lambda *args: SimpleNamespace(synchronize=lambda: None)
    torch.cuda.get_device_properties = lambda *args: SimpleNamespace(multi_processor_count=132, L2_cache_size=50 << 20)


_RUN = """
extern "C" void run_{name}(const Params* p, unsigned x, unsigned y, unsigned threads) {{
  emulation::launch(emulation::Configuration(dim3(x, y), dim3(threads)), {name}, *p);
}}
"""


class Generated:
    """A source made at run time, in place of nvrtc.Module."""

    def __init__(self, source: str, device: int):
        folder = BUILD / "generated"
        folder.mkdir(parents=True, exist_ok=True)
        names = re.findall(r'extern "C" __global__ .*? (\w+)\(const Params p\)', source)
        text = source + "".join(_RUN.format(name=name) for name in names)
        made = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
        if not made.exists():
            unit, part = made.with_suffix(".cpp"), made.with_suffix(f".{os.getpid()}.part")
            unit.write_text(text)
            clean = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
            command = ["g++", *with_header(QUICK), "-shared", str(unit), str(SWITCH), "-o", str(part)]
            subprocess.run(command, check=True, env=clean)
            part.rename(made)
        self._library = ctypes.CDLL(str(made))

    def kernel(self, name: str):
        run = getattr(self._library, "run_" + name)
        return lambda grid, threads, words, stream: run(words, *map(ctypes.c_uint, (*grid, threads)))


def main() -> int:
    arguments = sys.argv[1:]
    address_sanitizer = "--no-address-sanitizer" not in arguments
    module = build(address_sanitizer)
    tests = [a for a in arguments if a != "--no-address-sanitizer"] or TESTS
    env = os.environ | {EMULATED: str(module), "OMP_NUM_THREADS": "1", "ASAN_OPTIONS": "detect_leaks=0"}
    if address_sanitizer:
        # The second beside the first, which else finds nobody to hand exceptions on to.
        found = (subprocess.check_output(["g++", f"-print-file-name={name}"], text=True) for name in _PRELOADED)
        env["LD_PRELOAD"] = " ".join(path.strip() for path in found)
    parallel = ("-n", "2", "--dist", "worksteal") if tests is TESTS else ()
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *parallel, *tests], env=env, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
