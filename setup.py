"""Builds the binary with CMake, and puts gnnaccel.pth, which switches gnnaccel on by flag, beside the package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
PTH = ROOT / "gnnaccel.pth"


class BuildCMake(build_ext):
    """Configures and builds in build/, which stays: a second build compiles only what changed."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        half = os.environ.get("GNNACCEL_CUDA", "AUTO")
        folder = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}-{half.lower()}"
        library = folder / "lib"
        cmake = shutil.which("cmake") or "cmake"
        arguments = [
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={library}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",  # an isolated build's folder is gone the next time
            f"-DGNNACCEL_CUDA={half}",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]
        if (ninja := shutil.which("ninja")) is not None:
            arguments += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        subprocess.run([cmake, "-S", ROOT, "-B", folder, *arguments], check=True)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "2")
        subprocess.run([cmake, "--build", folder, "--parallel", jobs], check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(library / target.name), str(target))


class BuildPyWithPth(build_py):
    """Puts the .pth file at the root of the wheel, so that it is installed into site-packages."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_file(str(PTH), str(Path(self.build_lib, PTH.name)))

    def get_outputs(self, include_bytecode: bool = True) -> list:
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib, PTH.name))]


class EditableWheelWithPth(editable_wheel):
    """Puts the .pth file into editable wheels too."""

    def _select_strategy(self, name, tag, build_lib):
        return WithPth(super()._select_strategy(name, tag, build_lib))


class WithPth:
    """An editable strategy that also writes the .pth file."""

    def __init__(self, strategy):
        self.strategy = strategy

    def __enter__(self):
        self.strategy.__enter__()
        return self

    def __exit__(self, *error):
        return self.strategy.__exit__(*error)

    def __call__(self, wheel, files, mapping):
        self.strategy(wheel, files, mapping)
        wheel.writestr(PTH.name, PTH.read_text(encoding="utf-8"))


# Of wheels that differ in more than Python: 0.1.0+cu12 (.github/workflows/wheels.yml).
LABEL = {"egg_info": {"tag_build": os.environ.get("GNNACCEL_LABEL", "")}}

setup(
    options=LABEL,
    ext_modules=[Extension("gnnaccel._C", sources=[])],
    cmdclass={"build_ext": BuildCMake, "build_py": BuildPyWithPth, "editable_wheel": EditableWheelWithPth},
)
