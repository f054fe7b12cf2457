"""Ranks that fail: every rank ends, with an error that says what is wrong, and none waits for ever."""

import os
import re
import shutil
import signal
import sys

import forked
import numpy as np
import pytest
import torch
from command_line import ROOT
from rank_runs import TESTS, agree, cut_small, ranks

from gnnaccel import distributed
from gnnaccel.parts import files

FAULTS = TESTS / "fault_ranks.py"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small graph of tests/part_ranks.py in parts."""
    pytest.importorskip("torch_geometric")
    return cut_small(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("exits", "another rank has ended", ""),
        ("raises", "another rank has ended", "a fault of this rank's own"),
        ("sleeps", "exchange of halo rows failed", ""),
        ("shapes", r"rank 0 has rows of \(6,\)", r"rank 1 has rows of \(4,\)"),
        ("models", "rank 0 has a model of", "rank 1 has a model of"),
        ("killed forward", "exchange of halo rows failed: another rank has ended", ""),
        ("killed backward", "exchange of halo rows failed: another rank has ended", ""),
    ],
)
def test_a_rank_that_leaves_the_others(small, how, first, second):
    results = ranks(2, "dies", small / "2", how, timeout=120, script=FAULTS)
    for (code, output), said in zip(results, (first, second), strict=True):
        assert code != 0 and "went on" not in output
        assert re.search(said, output), output


def test_all_of_three_ranks_end_where_one_is_killed(small):
    results = ranks(3, "dies", small / "3", "killed forward", script=FAULTS)
    assert results[1][0] == -signal.SIGKILL
    for code, output in (results[0], results[2]):
        assert code == 1 and "another rank has ended" in output and "went on" not in output, output


def losses_of(results):
    agree(results)
    found = [[float(loss) for loss in re.findall(r"^loss (.*)$", output, re.M)] for _, output in results]
    assert all(each == found[0] for each in found)
    return found[0]


def test_checkpoints(small, tmp_path):
    """Model and optimizer go on as if nothing had been; the model alone goes on with any number of parts."""

    def run(parts, *arguments):
        return losses_of(ranks(parts, "checkpoint", small / str(parts), *arguments, script=FAULTS))

    whole = run(2, tmp_path / "whole", 5, "nothing")
    first = run(2, tmp_path / "kept", 3, "nothing")
    again = run(2, tmp_path / "kept", 2, "all")
    assert first == whole[:3]
    np.testing.assert_allclose(again, whole[3:], rtol=0, atol=1e-12)
    for parts in (1, 3):
        np.testing.assert_allclose(run(parts, tmp_path / "kept", 1, "model"), whole[3:4], rtol=0, atol=1e-9)


def test_what_one_rank_cannot_load_ends_all(small, tmp_path):
    shutil.copytree(small / "2", tmp_path / "parts")
    (tmp_path / "parts/part-0001/nodes.npz").unlink()
    (code, output), (other_code, other_output) = ranks(2, "loads", tmp_path / "parts", timeout=120)
    assert code == other_code == 1
    assert "failed on another rank: rank 1: distributed.load" in output and "nodes.npz: missing" in output
    assert "ValueError: distributed.load" in other_output and "nodes.npz: missing" in other_output


@pytest.mark.parametrize(
    ("how", "code", "said"), [("ends", 0, ""), ("raises", 1, "a problem"), ("differs", 1, "something else")]
)
def test_gloo_ends_before_python_does(how, code, said):
    """Or a thread of gloo's that lets go of tensors while Python ends aborts the process, after a few runs in 100."""
    for done, output in ranks(2, "leaves", how, timeout=120, script=FAULTS, fresh=True):
        assert done == code and said in output and output.endswith("left in order\n"), output


def test_another_number_of_ranks_than_parts(small):
    for code, output in ranks(2, "loads", small / "3", timeout=120):
        assert code == 1 and "3 parts, and 2 ranks: run as many (torchrun --nproc-per-node 3)" in output


def test_outside_torchrun(small):
    script = f"import gnnaccel; gnnaccel.distributed.load({str(small / '2')!r}, device='cpu')"
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    words = [sys.executable, "-c", script]
    done = forked.run(words, kept | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1 and "run the script by torchrun --nproc-per-node N script.py" in done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
def test_two_ranks_train_what_does_not_fit_one(tmp_path):
    generator = torch.Generator().manual_seed(0)
    nodes, half = 120_000, 60_000
    inside = torch.randint(0, half, (2, 800_000), generator=generator)
    inside += half * torch.randint(0, 2, (800_000,), generator=generator)
    edges = torch.cat([inside, torch.randint(0, nodes, (2, 2000), generator=generator)], 1)
    labels = torch.randint(0, 8, (nodes,), generator=generator)
    arrays = {"x": torch.randn(nodes, 128, generator=generator), "y": labels, "train_mask": labels >= 0}
    for parts in (1, 2):
        distributed.partition(edges, parts, tmp_path / str(parts), "range", nodes=arrays, num_nodes=nodes)
    ((code, output),) = ranks(1, "limited", tmp_path / "1", 440, script=FAULTS)
    assert code != 0 and "can't allocate memory" in output, output
    agree(ranks(2, "limited", tmp_path / "2", 440, script=FAULTS))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
def test_features_that_do_not_fit_are_cut_part_by_part(tmp_path):
    """Of 117 MiB in a file, by a process that may take 80; each of the four parts is as the file has it."""
    x = np.random.default_rng(0).random((30_000, 1024), np.float32)
    np.save(tmp_path / "x.npy", x)
    agree(ranks(1, "cuts", tmp_path / "x.npy", tmp_path / "parts", 80, script=FAULTS))
    about, _, _ = files.read_manifest(tmp_path / "parts")
    for rank in range(4):
        tables = files.read_part(tmp_path / "parts", rank, about)
        np.testing.assert_array_equal(tables[files.NODES]["x"], x[tables[files.GRAPH]["own"]])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, for NCCL")
@pytest.mark.parametrize(
    ("how", "first"),
    [
        *((how, "Watchdog caught collective operation timeout") for how in ("exits", "raises", "sleeps")),
        *((how, "Watchdog caught collective operation timeout") for how in ("killed forward", "killed backward")),
        ("shapes", r"rank 0 has rows of \(6,\)"),
        ("models", "rank 0 has a model of"),
    ],
)
def test_a_rank_that_leaves_the_others_on_gpus(small, how, first):
    """Torch ends the process, a minute after the timeout by default: it waits for what it may have to write."""
    soon = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
    results = ranks(2, "dies", small / "2", how, "cuda", timeout=150, script=FAULTS, **soon)
    for code, output in results:
        assert code != 0 and "went on" not in output, output
    assert re.search(first, results[0][1]), results[0][1]
