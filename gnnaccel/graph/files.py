"""Reading files that may be anything: what is declared in them is checked before memory is taken for it, and whatever
they make readers raise becomes one error that names the file. Knows NumPy alone."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import zipfile
from collections.abc import Collection, Iterator
from typing import IO

import numpy as np

from gnnaccel.lower import bounds

_COMPRESSION = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@contextlib.contextmanager
def reading(who: str, path: str | os.PathLike) -> Iterator[None]:
    """Raise ValueError, naming `who` and the file, for whatever is raised inside, which is the reading of that file.

    Damaged bytes make zip files, zlib, NumPy and SciPy raise nearly anything. Not for a package that is missing.
    """
    try:
        yield
    except ImportError:
        raise
    except MemoryError as error:
        raise ValueError(f"{who}: {os.fspath(path)}: no memory for what it holds ({error})") from error
    except Exception as error:
        told = isinstance(error, (ValueError, OSError, EOFError, zipfile.BadZipFile))
        reason = str(error) if told and str(error) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{who}: {os.fspath(path)}: {reason}") from error


def expect_memory(what: str, count: int, size: int) -> None:
    """Raise ValueError if `count` things of `size` bytes, as `what` asks for, are more than this machine's memory."""
    if count * size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise ValueError(f"no memory for {what}")


def arrays(source: str | os.PathLike | IO[bytes], names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Arrays of an .npz archive by name, of these `names` as far as they are there; by default all.

    Raises
    ------
    ValueError
        For an array of pickled objects, a compression that NumPy does not write, or sizes that cannot be those of the
        bytes in the archive. Others: for a damaged one, see `reading`.
    """
    with zipfile.ZipFile(source) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        wanted = {name: info for name, info in members.items() if names is None or name in names}
        expect_memory("the arrays in it", sum(info.file_size for info in wanted.values()), 1)
        return {name: _array(archive, name, info) for name, info in wanted.items()}


def array_names(path: str | os.PathLike) -> set[str]:
    """Names of the arrays in an .npz archive."""
    with zipfile.ZipFile(path) as archive:
        return {name.removesuffix(".npy") for name in archive.namelist()}


def array_shape(path: str | os.PathLike, name: str) -> tuple[int, ...]:
    """Shape of an array in an .npz archive, of which its header alone is read."""
    with zipfile.ZipFile(path) as archive:
        return _shape(archive, name, archive.getinfo(f"{name}.npy"))


def _array(archive: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> np.ndarray:
    _shape(archive, name, info)
    with archive.open(info) as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _shape(archive: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> tuple[int, ...]:
    if info.compress_type not in _COMPRESSION:
        raise ValueError(f"{name}: compressed by method {info.compress_type}, expected stored or deflated")
    if info.file_size > bounds.DEFLATED * (info.compress_size + 1):
        raise ValueError(f"{name}: declares {info.file_size:,} bytes, which {info.compress_size:,} cannot hold")
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{name}: expected an array of format 1.0 or 2.0, got {version}")
        header = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(member)
        declared, there = math.prod(shape) * dtype.itemsize, info.file_size - member.tell()
        if dtype.hasobject or any(length < 0 for length in shape) or declared != there:
            raise ValueError(f"{name}: expected {dtype} {list(shape)} as plain numbers, got {there:,} bytes")
    return tuple(shape)


def text_lines(file: IO[str], most: int = 1 << 20) -> Iterator[str]:
    """Lines of a text; ValueError for one that is longer than `most` characters, before it is all in memory."""
    while line := file.readline(most):
        if len(line) == most and not line.endswith("\n"):
            raise ValueError(f"a line of more than {most:,} characters")
        yield line


def content(path: str | os.PathLike, most: int, trusted: bool = False) -> bytes:
    """The bytes of a regular file; of a pipe or device, on which a reader might wait for ever, nothing.

    trusted : nobody but this user and root may have written it, wherever it lies: for what is to be run.

    Raises
    ------
    FileNotFoundError
        If there is none. ValueError: if it is no regular file, has more than `most` bytes, or is not `trusted`.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("no regular file")
        if trusted and (about.st_uid not in (0, os.geteuid()) or about.st_mode & 0o022):
            raise ValueError("another user wrote it, or may")
        found = file.read(most + 1)
    if len(found) > most:
        raise ValueError(f"more than {most:,} bytes")
    return found
