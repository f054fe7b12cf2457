"""How far rounding alone takes training in float32 apart, and how far training on parts is from one process.

    python benchmarks/rounding.py --files cora.npz amazon_computers.npz tolokers.npz --csv FILE

The same models from the same parameters, PyG's layers, Adam, losses of each epoch, and of these the largest difference
from one process in float32: permuted is one process too, its nodes, edges and features in another random order, so that
sums are over the same terms in another order and nothing else differs (the median and the largest of --orders of them);
parts_N are N ranks (gloo). exact_*: differences from one process in float64 instead, of one process in float32, of the
furthest permuted one, and of the parts. Where parts are no further off than permuted runs, what is left is rounding.
Two things make much of it: a ReLU (and attention's leaky one) whose input is so near 0 that rounding decides its side,
and with it whether a gradient passes; and Adam, which divides gradients by their own size, however small.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from timing import provenance, save_table, shown
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

import gnnaccel
from gnnaccel import data, distributed

MODELS = {"gcn": GCN, "sage": GraphSAGE, "gin": GIN, "gat": GAT}


def whole(path, dtype):
    found = data.load(path)
    x = torch.from_numpy(found.x).double()
    x = x / x.abs().sum(1, keepdim=True).clamp(min=1e-9)
    edges, y, mask = (torch.from_numpy(getattr(found, key)) for key in ("edge_index", "y", "train_mask"))
    return Data(x=x.to(dtype), edge_index=edges, y=y, train_mask=mask)


def permuted(graph, seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(graph.num_nodes, generator=generator)
    new = torch.empty_like(order)
    new[order] = torch.arange(len(order))
    edges = new[graph.edge_index][:, torch.randperm(graph.num_edges, generator=generator)]
    features = torch.randperm(graph.x.shape[1], generator=generator)
    x = graph.x[order][:, features].contiguous()
    return Data(x=x, edge_index=edges, y=graph.y[order], train_mask=graph.train_mask[order]), features


def model_of(kind, graph, classes, features=None):
    """The model from one seed; of features in another order the same function."""
    torch.manual_seed(0)
    model = MODELS[kind](graph.x.shape[1], 16, 2, classes)
    for weight in model.parameters() if features is not None else ():
        if weight.dim() == 2 and weight.shape[1] == len(features):
            weight.data = weight.data[:, features].contiguous()
    return model.to(graph.x.dtype)


def losses_of(model, graph, mean, epochs):
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4), []
    for _ in range(epochs):
        logits = model(graph.x, graph.edge_index)[graph.train_mask]
        loss = mean(F.cross_entropy(logits, graph.y[graph.train_mask], reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_part(rank, folder, ranks, kinds, epochs):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    part, kept = distributed.load(f"{folder}/parts", device="cpu"), {}
    for kind in kinds:
        model = distributed.wrap(model_of(kind, part, part.num_classes), part)
        kept[kind] = losses_of(model, part, part.mean, epochs)
    if rank == 0:
        torch.save(kept, f"{folder}/losses.pt")
    dist.destroy_process_group()


def by_parts(graph, parts, kinds, epochs):
    with tempfile.TemporaryDirectory() as folder:
        distributed.partition(graph, parts, f"{folder}/parts")
        mp.spawn(on_part, (folder, parts, kinds, epochs), nprocs=parts)
        return torch.load(f"{folder}/losses.pt")


def apart(some, others):
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=["cora"], help="graphs of gnnaccel.data's schema")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--orders", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--accelerated", action="store_true", help="one process on gnnaccel's kernels too: less time")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--commit", help="where git is not at hand")
    args = parser.parse_args()
    torch.set_num_threads(1)
    of_parts = [f"parts_{parts}" for parts in args.parts]
    columns = ["graph", "model", "epochs", "last_loss", "permuted_median", "permuted_most", *of_parts]
    columns += ["exact_one", "exact_permuted_most", *(f"exact_{name}" for name in of_parts)]
    rows = []
    for path in args.files:
        graph, double = whole(path, torch.float32), whole(path, torch.float64)
        classes = int(graph.y.max()) + 1
        parts = {
            name: by_parts(graph, n, args.models, args.epochs) for name, n in zip(of_parts, args.parts, strict=True)
        }
        for kind in args.models:

            def run(on, features=None, kind=kind, classes=classes):
                model = model_of(kind, on, classes, features)
                if args.accelerated:
                    model = gnnaccel.accelerate(model)
                return losses_of(model, on, torch.mean, args.epochs)

            one, exact = run(graph), run(double)
            orders = [run(*permuted(graph, seed)) for seed in range(args.orders)]
            away = [apart(losses, one) for losses in orders]
            row = {
                "graph": Path(path).stem,
                "model": kind,
                "epochs": args.epochs,
                "last_loss": one[-1],
                "permuted_median": statistics.median(away),
                "permuted_most": max(away),
                "exact_one": apart(one, exact),
                "exact_permuted_most": max(apart(losses, exact) for losses in orders),
            }
            for name, found in parts.items():
                row |= {name: apart(found[kind], one), f"exact_{name}": apart(found[kind], exact)}
            rows.append(shown(columns, row))
    if args.csv:
        save_table(args.csv, provenance(args.commit, "1 CPU thread"), columns, rows)


if __name__ == "__main__":
    main()
