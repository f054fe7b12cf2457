"""Graphs in worker processes, forked and spawned, of a loader and of plain multiprocessing."""

import os
import sys
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).resolve().parent.parent

# gnnaccel.install() stands before the import of DGL: a spawned worker imports this file again.
SCRIPT = """
import multiprocessing, sys
import torch
import gnnaccel
gnnaccel.install()
import dgl, dgl.nn
from gnnaccel import report


def make_graph():
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.randint(0, 60, (400,), generator=generator) for _ in range(2))
    g = dgl.add_self_loop(dgl.graph((u, v), num_nodes=60))
    g.ndata["x"] = torch.randn(60, 4, generator=generator)
    return g


def work(g, queue):
    out = dgl.ops.u_mul_e_sum(g, g.ndata["x"], torch.ones(g.num_edges(), 1))
    queue.put((out.numpy(), report.share(), sum(s.accelerated for s in report.snapshot().values())))


class Sampler(dgl.dataloading.Sampler):
    # Message passing inside the workers, on a subgraph of the graph that the main process has used.
    def sample(self, g, nodes):
        part = dgl.in_subgraph(g, nodes)
        part.ndata["y"] = dgl.ops.copy_u_mean(part, g.ndata["x"])
        part.edata["a"] = dgl.ops.edge_softmax(g, torch.ones(g.num_edges(), 1))[part.edata[dgl.EID]]
        return nodes, part


def main(method):
    torch.set_num_threads(1)
    g = make_graph()
    layer = dgl.nn.SAGEConv(4, 3, "mean")
    expected = dgl.ops.copy_u_sum(g, g.ndata["x"])
    means = dgl.ops.copy_u_mean(g, g.ndata["x"])
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    worker = context.Process(target=work, args=(g, queue))
    worker.start()
    loader = dgl.dataloading.DataLoader(
        g, torch.arange(60), Sampler(), batch_size=16, num_workers=2, multiprocessing_context=method
    )
    seen = 0
    for nodes, part in loader:
        torch.testing.assert_close(part.ndata["y"][nodes], means[nodes])
        degree = g.in_degrees()[part.edges()[1]].float().view(-1, 1)
        torch.testing.assert_close(part.edata["a"], 1 / degree)
        layer(part, part.ndata["x"]).sum().backward()
        seen += len(nodes)
    assert seen == 60
    if method == "fork":  # a spawned worker takes seconds to import DGL
        sampler = dgl.dataloading.NeighborSampler([3, 3])
        blocks = dgl.dataloading.DataLoader(g, torch.arange(60), sampler, batch_size=16, num_workers=2)
        for inputs, outputs, (first, second) in blocks:
            layer(first, g.ndata["x"][inputs]).sum().backward()
    got, share, count = queue.get(timeout=60)
    worker.join()
    torch.testing.assert_close(torch.from_numpy(got), expected)
    assert share == 1 and count > 0, (share, count)
    assert report.share() == 1, report.table()
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if "GNNACCEL" not in k}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(script), method]
    done = forked.run(command, environment)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr
