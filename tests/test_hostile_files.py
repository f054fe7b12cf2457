"""Files that were damaged or made to harm: whatever reads them gives a result or one ValueError that names the file."""

import collections
import io
import json
import os
import random
import zipfile

import numpy as np
import pytest
import torch
from test_data import arrays, csr
from test_load import FILES
from typer.testing import CliRunner

from gnnaccel import data
from gnnaccel.cli.app import app
from gnnaccel.graph import files, store
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.store import Stale
from gnnaccel.planning import plans

DAMAGED = 60  # files of each kind


def damaged(content: bytes, rng: random.Random) -> bytes:
    """With some bits flipped, a part cut out or its end gone."""
    out, kind = bytearray(content), rng.randrange(4)
    if kind == 0:
        return bytes(out[: rng.randrange(len(out))])
    if kind == 1:
        start = rng.randrange(len(out))
        del out[start : start + rng.randrange(1, 40)]
        return bytes(out)
    for _ in range(rng.choice((1, 1, 2, 8))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def outcome(read, path) -> str:
    """What reading gave; any error but a ValueError of this file is the test's failure."""
    try:
        read(path)
    except ValueError as error:
        assert str(path) in str(error)
        return "refused"
    return "read"


def compressed(path):
    np.savez_compressed(path, edge_index=np.arange(400).reshape(2, 200), num_nodes=400)


KINDS = {
    **{name: (make, Graph.load) for name, make in FILES.items()},
    "compressed.npz": (compressed, Graph.load),
    "data.npz": (lambda p: np.savez(p, **arrays()), data.load),
    "sparse.npz": (lambda p: np.savez_compressed(p, **csr()), data.load),
}


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files(name, tmp_path):
    make, read = KINDS[name]
    path = tmp_path / name
    make(path)
    content, rng, seen = path.read_bytes(), random.Random(name), collections.Counter()
    for _ in range(DAMAGED):
        path.write_bytes(damaged(content, rng))
        seen[outcome(read, path)] += 1
    assert seen["refused"] > DAMAGED // 10, seen


def header(descr="'<i8'", shape="(2, 3)", rest="", order="False") -> bytes:
    """The header of an array with the words of its dictionary, and nothing behind it."""
    words = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, {rest}}}".encode()
    words += b" " * (-(len(words) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(words).to_bytes(2, "little") + words


def array(value) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(value))
    return file.getvalue()


def archive(method=zipfile.ZIP_STORED, **members) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as made:
        for name, content in members.items():
            made.writestr(f"{name}.npy", content)
    return file.getvalue()


def declaring(content: bytes, real: int, size: int) -> bytes:
    """An archive whose directory gives a member of `real` bytes another size."""
    assert content.count(real.to_bytes(4, "little")) >= 2
    return content.replace(real.to_bytes(4, "little"), size.to_bytes(4, "little"))


PAIRS = array([[0, 1], [1, 0]])
CRAFTED = {
    "2^60 edges": archive(edge_index=header(shape="(2, 1 << 60)")),
    "many edges": archive(edge_index=header(shape=f"(2, {1 << 59})") + b"\0" * 32),
    "negative length": archive(edge_index=header(shape="(2, -1)")),
    "negative lengths": archive(edge_index=header(shape="(-2, -3)") + b"\0" * 48),
    "huge items": archive(edge_index=header(descr="'V2000000000'", shape="(2, 2)")),
    "text of any length": archive(edge_index=header(descr="'<U400000000'", shape="(2, 1)")),
    "shape of text": archive(edge_index=header(shape="'ab'")),
    "no shape": archive(edge_index=header(shape="None")),
    "a call for a dtype": archive(edge_index=header(descr="exit()")),
    "unknown dtype": archive(edge_index=header(descr="'<q77'") + b"\0" * 48),
    "pickled": archive(edge_index=header(descr="'|O'", shape="(2, 1)") + b"cos\nabort\n(tR."),
    "format 9": archive(edge_index=b"\x93NUMPY\x09\x00" + PAIRS[8:]),
    "no array": archive(edge_index=b"nothing"),
    "empty member": archive(edge_index=b""),
    "bytes left": archive(edge_index=PAIRS + b"\0"),
    "bzip2": archive(zipfile.ZIP_BZIP2, edge_index=PAIRS),
    "lzma": archive(zipfile.ZIP_LZMA, edge_index=PAIRS),
    "size of 2 GiB": declaring(archive(edge_index=PAIRS), len(PAIRS), (1 << 31) - 1),
    "size of 4 GiB": declaring(archive(zipfile.ZIP_DEFLATED, edge_index=PAIRS), len(PAIRS), (1 << 32) - 2),
    "num_nodes fractional": archive(edge_index=PAIRS, num_nodes=array(2.5)),
    "num_nodes of text": archive(edge_index=PAIRS, num_nodes=array("two")),
    "num_nodes several": archive(edge_index=PAIRS, num_nodes=array([2, 2])),
    "num_nodes complex": archive(edge_index=PAIRS, num_nodes=array(2j)),
    "num_nodes negative": archive(edge_index=PAIRS, num_nodes=array(-1)),
    "num_nodes 2^44": archive(edge_index=PAIRS, num_nodes=array(1 << 44)),
    "num_nodes 2^63": archive(edge_index=PAIRS, num_nodes=array(np.uint64(1 << 63))),
    "largest end": archive(edge_index=array([[0, 2**63 - 1], [1, 0]])),
    "unsigned end": archive(edge_index=array(np.array([[0, 2**64 - 1], [1, 0]], np.uint64))),
    "ends of two lengths": archive(src_li=array([0, 1]), dst_li=array([0])),
    "ends of two axes": archive(src_li=array([[0, 1]]), dst_li=array([[0, 1]])),
    "columns 2^50": archive(indptr=array([0, 1]), indices=array([0]), shape=array([1, 1 << 50])),
    "rows that are not": archive(indptr=array([0, 1]), indices=array([0]), shape=array([9, 2])),
    "descending offsets": archive(indptr=array([0, 4, 1]), indices=array([0]), shape=array([2, 2])),
    "shape of one": archive(indptr=array([0, 1]), indices=array([0]), shape=array([1])),
    "form of two": archive(indptr=array([0, 0]), indices=array([]), shape=array([1, 1]), format=array([b"csr", b""])),
}
MARKET = "%%MatrixMarket matrix coordinate real general\n"
TEXTS = {
    "entries.mtx": MARKET + "3 3 99999999999\n1 1 1\n",
    "rows.mtx": MARKET + "99999999999999 3 1\n1 1 1\n",
    "columns.mtx": MARKET + "3 9223372036854775807 1\n1 1 1\n",
    "outside.mtx": MARKET + "3 3 1\n4 1 1\n",
    "more entries.mtx": MARKET + "3 3 1\n1 1 1\n2 2 1\n",
    "symmetric.mtx": MARKET.replace("general", "symmetric") + "3 2 1\n2 1 1\n",
    "banner.mtx": "%%MatrixMarket\n3 3 1\n1 1 1\n",
    "sizes.mtx": MARKET + "3 3\n",
    "zero.mtx": MARKET + "3 3 1\n0 1 1\n",
    "negative.mtx": MARKET + "-3 3 1\n1 1 1\n",
    "dense.mtx": "%%MatrixMarket matrix array real general\n999999 9999999\n1\n",
    "huge.txt": "0 9223372036854775807\n",
    "larger.txt": "0 99999999999999999999\n",
    "line.txt": "0 " * (1 << 20) + "\n",
}


@pytest.mark.parametrize("name", CRAFTED)
@pytest.mark.parametrize("read", [Graph.load, data.load])
def test_crafted_archives(name, read, tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(CRAFTED[name])
    assert outcome(read, path) == "refused"


@pytest.mark.parametrize("name", TEXTS)
def test_crafted_texts(name, tmp_path):
    path = tmp_path / name
    path.write_text(TEXTS[name])
    assert outcome(Graph.load, path) == "refused"


@pytest.mark.parametrize("command", [["inspect"], ["compare", "--framework", "pyg", "--model", "gcn", "--dataset"]])
@pytest.mark.parametrize("name", ["2^60 edges", "lzma", "pickled", "num_nodes complex"])
def test_commands_say_one_line(command, name, tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(CRAFTED[name])
    done = CliRunner().invoke(app, [*command, str(path)])
    assert done.exit_code not in (0, None) and (done.exception is None or isinstance(done.exception, SystemExit))
    assert "Traceback" not in done.output and str(path) in done.output.replace("\n", "")


def kept(tmp_path):
    """A graph, and for orders and plans of it on disk: the file, the function that reads it."""
    graph = Graph.from_coo([0, 1, 2, 2], [1, 2, 0, 1])
    store.save_order(graph, "rcm", torch.tensor([2, 0, 1]), tmp_path)
    plans.save(graph, [], tmp_path)
    return {
        "order": (store.order_path(graph, "rcm", tmp_path), lambda: store.load_order(graph, "rcm", tmp_path)),
        "plans": (plans.path_of(graph, tmp_path), lambda: plans.load(graph, tmp_path)),
    }


@pytest.mark.parametrize("kind", ["order", "plans"])
def test_damaged_files_that_were_kept(kind, tmp_path):
    path, read = kept(tmp_path)[kind]
    content, rng = path.read_bytes(), random.Random(kind)
    good = read()
    bad = [damaged(content, rng) for _ in range(DAMAGED)] + list(CRAFTED.values())
    bad += [json.dumps({"content": deep}).encode() for deep in (None, [], 3)] + [b"[" * 100_000, b"\0" * (1 << 25)]
    for change in bad:
        path.write_bytes(change)
        try:
            found = read()
        except Stale:
            continue
        assert torch.equal(found, good) if kind == "order" else found == good


@pytest.mark.parametrize("kind", ["order", "plans"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_only_files_are_opened(kind, make, tmp_path):
    path, read = kept(tmp_path)[kind]
    path.unlink()
    make(path)
    with pytest.raises(Stale, match=r"regular file|directory"):
        read()


def test_memory_is_asked_for_before_it_is_taken():
    files.expect_memory("a page", 1, 4096)
    with pytest.raises(ValueError, match="no memory for all of it"):
        files.expect_memory("all of it", 1 << 60, 8)
