"""Whole training epochs of unmodified PyG and DGL scripts: alone, compiled, on torch CSR and under the flag.

    python benchmarks/epochs.py --device cuda --graphs cora citeseer pubmed arxiv-like --csv out.csv
    python benchmarks/epochs.py --graphs cora --models gcn gat --threads 1 --quick
    python benchmarks/epochs.py --device cuda --per-op

Two layers, 64 hidden, Adam, cross entropy over all nodes, no dropout, undirected edges, random features and labels. An
epoch is zero_grad, forward, loss, backward and step.

Sides: pyg, PyG alone on edge_index; compiled, the same by torch.compile; csr, PyG alone on torch.sparse_csr; flag, PyG
with GNNACCEL=1; dgl, DGL alone (on the CPU: its wheel has no CUDA); dgl-flag, DGL with GNNACCEL=1; compiled-flag and
csr-flag; modules-flag and dgl-modules-flag, the same script as flag with GNNACCEL_CUDA_GRAPHS=1; captured-flag and
dgl-captured-flag, the epoch under gnnaccel.captured; hand-flag, captured by hand (CUDA; its losses are not compared).
Each is epochs_train.py, a plain script, in a process of its own, with all graphs and models one after the other; the
sides take turns, so that a drift of the machine shows in spread_ms.

epoch_ms: median over the turns of the medians of blocks of epochs, synchronised around blocks alone; spread_ms: from
the quickest turn to the slowest; iqr_ms: of blocks within a turn; of_pyg, of_flag: epoch_ms over that of the side pyg
or flag (less than 1 is quicker); first_ms: the first epoch of the first turn, preparation or compilation included (less
where Inductor's cache has it; kernels are loaded before); peak_mib: most CUDA memory at a time, graph and features
included; loss: of the last epoch compared; loss_diff: largest relative difference from PyG alone over the first epochs.
More than LIMIT is a failure, as is an error under the flag where the side without it has none: the exit code is 1 then.
Geometric means are over small graphs, of at most SMALL edges.

Of modules-flag and dgl-modules-flag it is printed after each turn how many calls were replays, and why others were not.

--per-op: instead of all this, calls on a graph of 12 nodes (per_op.py). Sampled blocks: minibatch.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import graphs
import numpy as np
import per_op
import torch
from epochs_table import COLUMNS, LOSSES, TIMED_OUT, Case, Outcome, Outcomes, judge, show, summary, table
from epochs_train import DGL_MODELS, MODELS
from timing import clocks_under_load, provenance, save_table, short

from gnnaccel import data, switch
from gnnaccel.cli import children

SCRIPT = Path(__file__).parent / "epochs_train.py"
# Options of the script, and how children.command starts it.
SIDES = {
    "pyg": (["--layers", "pyg"], "off"),
    "compiled": (["--layers", "pyg", "--compile", "default"], "off"),
    "csr": (["--layers", "csr"], "off"),
    "flag": (["--layers", "pyg"], "on"),
    "compiled-flag": (["--layers", "pyg", "--compile", "default"], "on"),
    "csr-flag": (["--layers", "csr"], "on"),
    "modules-flag": (["--layers", "pyg"], "on"),
    "dgl-modules-flag": (["--layers", "dgl"], "on"),
    "captured-flag": (["--layers", "pyg", "--capture", "gnnaccel"], "on"),
    "hand-flag": (["--layers", "pyg", "--capture", "hand"], "on"),
    "dgl-captured-flag": (["--layers", "dgl", "--capture", "gnnaccel"], "on"),
    "dgl": (["--layers", "dgl"], "compat"),
    "dgl-flag": (["--layers", "dgl"], "on"),
}
ENVIRONMENTS = {side: {switch.GRAPHS: "1"} for side in SIDES if "modules" in side}
DEFAULT_SIDES = ("pyg", "csr", "flag", "dgl-flag", "compiled")  # last what may use up the time
# (device, small, quick) -> epochs of warm-up, blocks, epochs of a block. Lists of work come with the 51st call of a
# graph, and an epoch of two layers makes two and more.
SCHEDULES = {
    ("cuda", True, False): (60, 7, 10),
    ("cuda", True, True): (30, 3, 5),
    ("cuda", False, False): (30, 5, 5),
    ("cuda", False, True): (26, 3, 3),
    ("cpu", True, False): (10, 7, 10),
    ("cpu", True, True): (5, 3, 5),
    ("cpu", False, False): (3, 3, 4),
    ("cpu", False, True): (2, 3, 3),
}


def edges_of(name: str, options: argparse.Namespace) -> tuple[np.ndarray, int]:
    """edge_index int32 [2, E], both directions, sorted by source as PyG's to_undirected has it, and the nodes."""
    if name.partition(":")[0] in graphs.GRAPHS:
        made = graphs.generate(name, options.device, options.scale)
        rows = torch.arange(made["num_nodes"], device=options.device).repeat_interleave(made["indptr"].diff().long())
        edge_index = torch.stack([rows.int(), made["indices"]]).cpu().numpy()
        return edge_index, made["num_nodes"]
    with np.load(data.find(name), allow_pickle=False) as file:
        edge_index = file["edge_index"].astype(np.int64)
        nodes = int(file["num_nodes"]) if "num_nodes" in file else int(edge_index.max()) + 1
    source, target = edge_index[:, edge_index[0] != edge_index[1]]
    key = np.unique(np.concatenate([source * nodes + target, target * nodes + source]))
    return np.stack([key // nodes, key % nodes]).astype(np.int32), nodes


def make_cases(options: argparse.Namespace, folder: str) -> list[Case]:
    """Every model on every graph; the graphs are written to `folder`."""
    cases = []
    for name in options.graphs:
        short_name = Path(name).stem if name.endswith(".npz") else name
        path = str(Path(folder, f"{short_name}.npz"))
        edge_index, nodes = edges_of(name, options)
        np.savez(path, edge_index=edge_index, num_nodes=nodes)
        cases += [Case(short_name, model, path, nodes, edge_index.shape[1]) for model in options.models]
        print(f"{short_name}: {nodes} nodes, {edge_index.shape[1]} edges", flush=True)
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return cases


def run_script(words: list[str], env: dict[str, str], limit_s: float, on_line: Callable[[dict], None]) -> str:
    """Run the script, `on_line` being called with what it says; why it ended early, or nothing."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        process = subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints, text=True,
            start_new_session=True,
        )  # fmt: skip
        late = threading.Event()

        def stop() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)  # with the compiler's workers

        timer = threading.Timer(limit_s, stop)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    on_line(json.loads(line))
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                stop()
                process.wait()
        if late.is_set():
            return TIMED_OUT
        complaints.seek(0)
        last = ([line for line in complaints.read().splitlines() if line.strip()] or ["it said nothing"])[-1]
        return f"exit code {code}: {last[:200]}" if code else ""


class Turn:
    """One side's turn: all its cases in one process, and in another what a crash has left."""

    def __init__(self, side: str, number: int, options: argparse.Namespace, outcomes: Outcomes):
        self.side, self.number, self.options, self.outcomes = side, number, options, outcomes
        self.words, self.mode = SIDES[side]
        self.current = ""
        self.left: list[Case] = []

    def run(self, cases: list[Case], folder: str, deadline: float) -> None:
        end = min(time.monotonic() + self.options.limit, deadline)
        self.left = [case for case in cases if not self.outcomes[self.side, case.name].problem]
        while self.left:
            limit_s = end - time.monotonic()
            problem = TIMED_OUT if limit_s <= 0 else self.start(folder, limit_s)
            if not problem:
                return
            if problem == TIMED_OUT or not self.current:  # no time for the others, or it never came to a case
                stopped = [case.name for case in self.left]
            else:  # the case it was at, if any: an error that spoils the device ends it between cases
                stopped = [case.name for case in self.left if case.name == self.current]
            for name in stopped:
                self.note(name, {"error": problem})

    def start(self, folder: str, limit_s: float) -> str:
        plan = Path(folder, "plan.json")
        options, cases = self.options, []
        for case in self.left:
            sizes = SCHEDULES[options.device, case.small, options.quick]
            counts = dict(zip(("warm_up", "blocks", "epochs"), sizes, strict=True))
            cases.append({"name": case.name, "graph": case.path, "model": case.model, **counts})
        common = {key: getattr(options, key) for key in ("device", "threads", "features", "hidden", "classes")}
        plan.write_text(json.dumps({**common, "losses": LOSSES, "cases": cases}), encoding="utf-8")
        profile = Path(folder, "profile.json") if self.side in ENVIRONMENTS else None
        words, env = children.command(self.mode, profile)
        env |= ENVIRONMENTS.get(self.side, {})
        self.current = ""
        problem = run_script([*words, str(SCRIPT), *self.words, str(plan)], env, limit_s, self.hear)
        if profile is not None and profile.exists():
            self.tell_captures(json.loads(profile.read_text(encoding="utf-8"))["sites"])
            profile.unlink()
        return problem

    def tell_captures(self, sites: dict) -> None:
        """Print how many calls of models were replays, and why others were not: a slow turn may be the machine's."""
        captured = {kind: site for kind, site in sites.items() if kind.startswith("captured.")}
        if not captured:
            print(f"turn {self.number}  {self.side:13} no model was captured", flush=True)
        for kind, site in captured.items():
            why = "".join(f"; {reason} ({count})" for reason, count in site["reasons"].items())
            print(
                f"turn {self.number}  {self.side:13} {kind}: {site['accelerated']}, left {site['left']}{why}",
                flush=True,
            )

    def hear(self, said: dict) -> None:
        if "modules" in said:
            loaded = "gnnaccel._library" in said["modules"]
            if loaded != (self.mode == "on"):
                raise SystemExit(
                    f"{self.side}: gnnaccel is {'on' if loaded else 'off'} in a script that is to run {self.mode}"
                )
        elif "begin" in said:
            self.current = said["begin"]
        else:
            self.note(said.pop("end"), said)

    def note(self, name: str, found: dict) -> None:
        """Keep and print what was found of a case."""
        self.left = [case for case in self.left if case.name != name]
        outcome = self.outcomes[self.side, name]
        if "error" in found:
            outcome.problem = found["error"] if not outcome.turns else f"turn {self.number}: {found['error']}"
            text = found["error"]
        else:
            outcome.turns.append(found)
            text = f"{found['epoch_ms']:8.3f} ms{self.beside(name, found)}"
        print(f"turn {self.number}  {self.side:13} {name:28} {text}", flush=True)

    def beside(self, name: str, found: dict) -> str:
        """Ratio to PyG's same turn, where it is there."""
        turns = self.outcomes["pyg", name].turns if ("pyg", name) in self.outcomes else []
        mine = len(self.outcomes[self.side, name].turns)
        same = self.side != "pyg" and len(turns) >= mine
        return f"  {found['epoch_ms'] / turns[mine - 1]['epoch_ms']:5.2f}x" if same else ""


def runnable(sides: list[str], options: argparse.Namespace) -> list[str]:
    """The sides that can run here, with a line for each that cannot."""
    kept = []
    for side in sides:
        if side.startswith("dgl") and importlib.util.find_spec("dgl") is None:
            print(f"{side}: left out, DGL is not installed", flush=True)
        elif side == "dgl" and options.device == "cuda":
            print("dgl: left out, DGL's wheel has no CUDA of its own", flush=True)
        else:
            kept.append(side)
    return kept


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    known = f"{', '.join(data.names())}; stand-ins {', '.join(graphs.GRAPHS)}; or a path.npz"
    parser.add_argument("--graphs", nargs="+", default=["cora", "citeseer", "pubmed"], metavar="NAME", help=known)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--sides", nargs="+", default=list(DEFAULT_SIDES), choices=list(SIDES))
    parser.add_argument("--turns", type=int, default=3, help="of every side")
    parser.add_argument("--quick", action="store_true", help="3 x 5 epochs, less warm-up")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a side's turn")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for everything, the table written then")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    parser.add_argument("--scale", type=float, default=1.0, help="of the stand-ins, for dry runs")
    for name, default in (("features", 128), ("hidden", 64), ("classes", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--per-op", action="store_true", help="calls on a tiny graph instead of epochs")
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", metavar="OUT", help="also write the figures there, after every turn of all sides")
    options = parser.parse_args()
    for name in options.graphs:
        if name.partition(":")[0] not in graphs.GRAPHS:
            try:
                data.find(name)
            except data.UnknownDataset as error:
                parser.error(f"--graphs: {error}, or one of {', '.join(graphs.GRAPHS)}")
    return options


def header(options: argparse.Namespace) -> list[str]:
    threads = options.threads or torch.get_num_threads()
    where = clocks_under_load() if options.device == "cuda" else f"on the CPU, {threads} thread(s)"
    head = provenance(options.commit, where)
    print(*head, sep="\n", flush=True)
    return head


def epochs(options: argparse.Namespace, head: list[str], folder: str) -> list[str]:
    """Measure and print; the failures."""
    deadline = time.monotonic() + options.budget
    sides, cases = runnable(options.sides, options), make_cases(options, folder)
    taken = {
        side: [c for c in cases if c.model in (DGL_MODELS if side.startswith("dgl") else MODELS)] for side in sides
    }
    outcomes = {(side, case.name): Outcome() for side in sides for case in taken[side]}
    failures: list[str] = []
    for number in range(1, options.turns + 1):
        for side in sides:
            Turn(side, number, options, outcomes).run(taken[side], folder, deadline)
        failures = judge(outcomes)
        rows, lines = table(outcomes, cases), summary(outcomes, cases, sides)
        if options.csv:
            notes = [f"# {line}" for line in lines]
            save_table(options.csv, head + notes, COLUMNS, [[short(row.get(c)) for c in COLUMNS] for row in rows])
    show(rows, sides)
    print(*lines, sep="\n", flush=True)
    return failures


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # what it has started ends with it
    head = header(options)
    if options.per_op:
        per_op.main(torch.device(options.device), head, options.csv)
        return
    with tempfile.TemporaryDirectory() as folder:
        failures = epochs(options, head, folder)
    if failures:
        raise SystemExit("FAILED\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
