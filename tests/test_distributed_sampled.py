"""Sampled training as PyG's and DGL's users write it for several processes, unmodified, under the flag."""

import functools
import os
import re
import socket
import subprocess
import sys
import tempfile

import forked
import numpy as np
import pytest
import torch
from command_line import ROOT
from rank_runs import TESTS, agree, ranks

SCRIPT = TESTS / "ddp_scripts.py"


def environment(**more):
    kept = {key: value for key, value in os.environ.items() if "GNNACCEL" not in key}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))  # where DGL may be
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def test_learns_under_the_flag(tmp_path):
    """DistributedDataParallel and a shuffled NeighborLoader, with our samplers and kernels."""
    pytest.importorskip("torch_geometric")
    results = ranks(2, tmp_path, script=TESTS / "sampled_ranks.py", GNNACCEL="1", GNNACCEL_PROFILE="1")
    agree(results)
    for _, output in results:
        assert re.search(r"pyg\.SAGEConv", output), output
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@functools.cache
def plain_losses(kind, flag):
    """Those of each of two processes without gnnaccel, by no launcher, which makes no difference to them."""
    with tempfile.TemporaryDirectory() as folder:
        agree(ranks(2, kind, folder, script=SCRIPT, timeout=120, GNNACCEL=flag))
        return [torch.load(f"{folder}/losses{rank}.pt") for rank in range(2)]


def losses(folder, kind, launcher, place="cpu"):
    """Of each of two processes under the flag; and what they print."""
    folder.mkdir()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [sys.executable, "-W", "ignore", *(torchrun if launcher == "torchrun" else []), SCRIPT, kind, folder]
    env = environment(GNNACCEL="1", GNNACCEL_PROFILE="1")
    done = forked.run([*words, place], env)  # which starts the two
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"losses{rank}.pt") for rank in range(2)], done.stdout + done.stderr


KINDS = pytest.mark.parametrize(
    ("kind", "plain", "flag", "told"),
    [("pyg", "whole", "", r"pyg\.GATConv +[1-9]"), ("dgl", "dgl", "compat", r"copy_lhs\.mean +[1-9]")],
)


@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
@KINDS
def test_losses_under_the_flag_are_those_without(tmp_path, kind, plain, flag, told, launcher):
    """PyG alone cannot sample here (it has neither pyg-lib nor torch-sparse): it trains on the whole graph, of which
    the seeds of each batch count, which is what batches of all neighbours are. DGL alone needs its shim."""
    pytest.importorskip("torch_geometric" if kind == "pyg" else "dgl_compare")
    found, output = losses(tmp_path / "ours", kind, launcher)
    expected = plain_losses(plain, flag)
    for rank in range(2):
        assert len(found[rank]) == 15
        np.testing.assert_allclose(found[rank], expected[rank], rtol=0, atol=1e-5)
    assert found[0] != found[1] and len(re.findall(told, output)) == 2, output


def distributed_graph(folder, flag):
    """Losses of two trainers on DGL's DistGraph, which a server of its own holds; and what they print."""
    script = [sys.executable, "-W", "ignore", str(TESTS / "dist_graph_ranks.py")]
    folder.mkdir()
    env = environment(GNNACCEL=flag, GNNACCEL_PROFILE="1")
    done = forked.run([*script, "cut", folder], env)
    assert done.returncode == 0, done.stderr
    with socket.socket() as free, socket.socket() as other:
        free.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = free.getsockname()[1], other.getsockname()[1]
    (folder / "ip_config.txt").write_text(f"127.0.0.1 {ports[0]}\n")
    env |= {"DGL_DIST_MODE": "distributed", "DGL_NUM_SERVER": "1", "DGL_NUM_CLIENT": "2", "DGL_NUM_SAMPLER": "0"}
    env |= {"DGL_IP_CONFIG": f"{folder}/ip_config.txt", "DGL_CONF_PATH": f"{folder}/toy.json", "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[1]), "DGL_GRAPH_FORMAT": "csc"}
    # Processes of their own: forks have hung twice in some sixty runs, plain DGL's too, after the last loss.
    roles = [{"DGL_ROLE": "server", "DGL_SERVER_ID": "0"}, *({"DGL_ROLE": "client", "RANK": str(r)} for r in (0, 1))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen([*script, "train", folder], env=env | role, **pipes) for role in roles]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in started[1:]]
    finally:
        for process in started:
            process.kill()
            process.wait()
    # Which share a trainer gets is DGL's choice, by the order in which they meet their server.
    return sorted([float(loss) for loss in re.findall(r"^loss (.*)$", output, re.M)] for output in outputs), outputs


def test_dgl_distributed_graph(tmp_path):
    pytest.importorskip("dgl_compare")
    found, outputs = distributed_graph(tmp_path / "ours", "1")
    expected, _ = distributed_graph(tmp_path / "plain", "compat")
    for rank in range(2):
        assert len(found[rank]) == 12, outputs[rank]
        np.testing.assert_allclose(found[rank], expected[rank], rtol=0, atol=1e-5)
        assert re.search(r"copy_lhs\.mean +24 +0", outputs[rank]), outputs[rank]


def cut(folder, kind):
    script = [sys.executable, "-W", "ignore", str(TESTS / "pyg_dist_ranks.py"), "cut", str(folder), kind]
    done = forked.run(script, environment(GNNACCEL="1"))
    assert done.returncode == 0, done.stderr


def on_parts(what, folder, kind, flag):
    """What two ranks of torch_geometric.distributed print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = {"GNNACCEL": flag, "GNNACCEL_PROFILE": flag}
    results = ranks(2, what, folder, kind, port, script=TESTS / "pyg_dist_ranks.py", timeout=120, **more)
    agree(results)
    return [output for _, output in results]


@pytest.mark.parametrize("kind", ["homo", "hetero"])
def test_pygs_distributed_loader_trains_as_the_whole_graph_does(tmp_path, kind):
    """All neighbours: what PyG alone, which needs pyg-lib for this loader, makes of the whole graph."""
    pytest.importorskip("torch_geometric")
    cut(tmp_path, kind)
    found, expected = on_parts("train", tmp_path, kind, "1"), on_parts("whole", tmp_path, kind, "0")
    for output, plain in zip(found, expected, strict=True):
        losses, wanted = ([float(loss) for loss in re.findall(r"^loss (.*)$", o, re.M)] for o in (output, plain))
        np.testing.assert_allclose(losses, wanted, rtol=0, atol=1e-5)
        assert len(losses) >= 6
        assert re.search(r"pyg\.SAGEConv +[1-9]", output) and re.search(r"DistNeighborSampler +[1-9]", output), output


def test_pygs_distributed_loaders_draw_edges_of_the_graph(tmp_path):
    pytest.importorskip("torch_geometric")
    cut(tmp_path, "homo")
    on_parts("draw", tmp_path, "homo", "1")


# --- CUDA


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, for NCCL")
@KINDS
def test_losses_on_two_gpus_are_those_of_the_framework_on_cpus(tmp_path, kind, plain, flag, told):
    pytest.importorskip("torch_geometric" if kind == "pyg" else "dgl_compare")
    found, output = losses(tmp_path / "ours", kind, "torchrun", "cuda")
    expected = plain_losses(plain, flag)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    told = r"pyg\.NeighborSampler +[1-9]" if kind == "pyg" else told  # on GPUs so few messages of a batch stay PyG's
    assert len(re.findall(told, output)) == 2, output
