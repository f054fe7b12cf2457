"""Whole training epochs of compiled PyG models, with and without the flag, side by side: their time, memory, compiling.

    python benchmarks/compiled.py --device cuda --graphs arxiv-like amazon0505-like --csv out.csv
    python benchmarks/compiled.py --device cuda --graphs cora --models gcn sage gat --sides reduced reduced-flag
    python benchmarks/compiled.py --graphs arxiv-like --scale 0.1 --threads 1

The epochs of epochs.py, which runs one process after the other. Here each graph, model and side has a process of its
own, and all of these compile at the same time, each on one core, with Inductor's caches empty; then one process at a
time is let run, the sides taking turns with each case, so that a drift of the machine meets both.

Sides: compiled, torch.compile(model); reduced, with mode="reduce-overhead"; compiled-flag and reduced-flag, the same
with GNNACCEL=1; flag and pyg, without torch.compile.

epoch_ms, spread_ms, iqr_ms: as of epochs.py; of_alone: epoch_ms over that of the side without the flag (less than 1 is
quicker); peak_mib: most CUDA memory at a time while compiled epochs run, graph and features included; memory_of_alone
its ratio; compile_s, compile_cpu_s: the first three epochs, in seconds and in seconds of the CPU, of the process and of
what it has started; compiling_of_alone: the ratio of the latter; loss_diff: largest relative difference of the first
losses from those of the side without the flag. More than LIMIT is a failure: the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from epochs import SCHEDULES, make_cases
from epochs_table import LIMIT, LOSSES, Case, Outcome, difference
from timing import clocks_under_load, provenance, save_table, short

from gnnaccel.cli import children

SCRIPT = Path(__file__).parent / "epochs_train.py"
MODELS = ("gcn", "sage", "gin", "gat", "gatv2", "transformer")
MODES = {"pyg": None, "compiled": "default", "reduced": "reduce-overhead"}
SIDES = ("compiled", "compiled-flag", "reduced", "reduced-flag", "pyg", "flag")
COLUMNS = (
    "graph", "nodes", "edges", "model", "side", "epoch_ms", "spread_ms", "iqr_ms", "of_alone", "peak_mib",
    "memory_of_alone", "compile_s", "compile_cpu_s", "compiling_of_alone", "loss", "loss_diff", "turns", "note",
)  # fmt: skip


def alone(side: str) -> str:
    """The side without the flag."""
    return "pyg" if side == "flag" else side.removesuffix("-flag")


class Server:
    """A process that holds one side of a case."""

    def __init__(self, side: str, case: Case, options: argparse.Namespace, folder: str):
        self.side, self.case = side, case
        plan = Path(folder, f"{case.name.replace('/', '-')}-{side}.json")
        common = {key: getattr(options, key) for key in ("device", "threads", "features", "hidden", "classes")}
        counts = zip(("warm_up", "blocks", "epochs"), SCHEDULES[options.device, case.small, True], strict=True)
        planned = {"name": case.name, "graph": case.path, "model": case.model, **dict(counts)}
        plan.write_text(json.dumps({**common, "losses": LOSSES, "cases": [planned]}), encoding="utf-8")
        words, env = children.command("on" if side.endswith("flag") else "off")
        mode = MODES[alone(side)]
        words += [str(SCRIPT), "--layers", "pyg", *(["--compile", mode] if mode else []), "--serve", str(plan)]
        # One compiler for each: as many processes as there are cores compile at a time.
        env |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": f"{plan}.cache"}
        env |= {"TRITON_CACHE_DIR": f"{plan}.triton"}
        self.complaints = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - ends with us
        self.process = subprocess.Popen(
            words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.complaints, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.said: queue.Queue = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            if line.startswith("{"):
                self.said.put(json.loads(line))
        self.said.put({"error": self._why()})

    def _why(self) -> str:
        self.process.wait()
        self.complaints.seek(0)
        last = ([line for line in self.complaints.read().splitlines() if line.strip()] or ["it said nothing"])[-1]
        return f"exit code {self.process.returncode}: {last[:200]}"

    def hear(self, deadline: float) -> dict:
        """What it says next; an error if it has ended or says nothing in time."""
        try:
            return self.said.get(timeout=max(deadline - time.monotonic(), 0.01))
        except queue.Empty:
            return {"error": "timed out"}

    def measure(self, deadline: float) -> dict:
        try:
            print(0, file=self.process.stdin, flush=True)
        except OSError:
            return {"error": self._why()}
        return self.hear(deadline)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def wait_until_made(servers: list[Server], outcomes: dict, deadline: float) -> list[Server]:
    """Those that have compiled their case; the others are stopped."""
    ready = []
    for server in servers:
        problem = ""
        while "ready" not in (said := server.hear(deadline)):
            if "error" in said:
                problem = outcomes[server.side, server.case.name].problem = said["error"]
                break
        if problem:
            server.stop()
        else:
            ready.append(server)
        print(f"{server.side} {server.case.name}: {problem or 'made'}, {time.monotonic() - START:.0f} s", flush=True)
    return ready


def take_turns(servers: list[Server], outcomes: dict, turns: int, deadline: float) -> None:
    for number in range(1, turns + 1):
        for server in servers:
            outcome = outcomes[server.side, server.case.name]
            if outcome.problem or time.monotonic() > deadline:
                continue
            found = server.measure(deadline)
            if "error" in found:
                outcome.problem = found["error"]
            else:
                outcome.turns.append(found)
            text = found.get("error") or f"{found['epoch_ms']:8.3f} ms"
            print(f"turn {number}  {server.side:13} {server.case.name:28} {text}", flush=True)


def rows_of(outcomes: dict, cases: list[Case]) -> tuple[list[dict], list[str]]:
    """The table, and lines that name the failures."""
    rows, failures = [], []
    for case in cases:
        for side in [side for side, name in outcomes if name == case.name]:
            outcome = outcomes[side, case.name]
            base = outcomes.get((alone(side), case.name), Outcome())
            row = {"graph": case.graph, "nodes": case.nodes, "edges": case.edges, "model": case.model, "side": side}
            row |= {"turns": len(outcome.turns), "note": outcome.problem}
            if outcome.turns:
                times, last = [turn["epoch_ms"] for turn in outcome.turns], outcome.turns[-1]
                row |= {"epoch_ms": outcome.epoch_ms, "spread_ms": max(times) - min(times), "loss": last["losses"][-1]}
                row["iqr_ms"] = statistics.median(turn["iqr_ms"] for turn in outcome.turns)
                row |= {key: last[key] for key in ("peak_mib", "compile_s", "compile_cpu_s")}
            if outcome.turns and base.turns and side != alone(side):
                theirs = base.turns[-1]
                row["of_alone"] = outcome.epoch_ms / base.epoch_ms
                row["memory_of_alone"] = last["peak_mib"] / theirs["peak_mib"] if last["peak_mib"] else None
                row["compiling_of_alone"] = (
                    last["compile_cpu_s"] / theirs["compile_cpu_s"] if MODES[alone(side)] else None
                )
                row["loss_diff"] = difference(outcome, base)
                if not row["loss_diff"] <= LIMIT:
                    failures.append(f"{side} {case.name}: losses differ by {row['loss_diff']:.2g}")
            elif outcome.problem and not base.problem and side != alone(side):
                failures.append(f"{side} {case.name}: {outcome.problem}")
            rows.append(row)
    return rows, failures


def means(rows: list[dict]) -> list[str]:
    """Geometric means of the ratios of each side with the flag."""
    lines = []
    for side in dict.fromkeys(row["side"] for row in rows):
        for column in ("of_alone", "memory_of_alone", "compiling_of_alone"):
            found = {
                f"{row['graph']}/{row['model']}": row[column] for row in rows if row["side"] == side and row.get(column)
            }
            if found:
                worst = max(found, key=lambda name: found[name])
                mean = statistics.geometric_mean(found.values())
                lines.append(
                    f"{side}: {column} {mean:.3f} in geometric mean of {len(found)}, {min(found.values()):.2f} to "
                    f"{found[worst]:.2f} ({worst})"
                )
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--graphs", nargs="+", default=["arxiv-like", "amazon0505-like"], metavar="NAME")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--sides", nargs="+", default=["compiled", "compiled-flag"], choices=SIDES)
    parser.add_argument("--also", nargs="+", default=[], metavar="GRAPH:MODEL:SIDE", help="further cases")
    parser.add_argument("--turns", type=int, default=3, help="of every side")
    parser.add_argument("--budget", type=float, default=600, help="seconds for everything, the table written then")
    parser.add_argument(
        "--measuring",
        type=float,
        default=20,
        help="seconds of them left for that; what is not made by then is left out",
    )
    parser.add_argument("--at-once", type=int, default=0, help="processes that compile at a time; 0: all")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    parser.add_argument("--scale", type=float, default=1.0, help="of the stand-ins, for dry runs")
    for name, default in (("features", 128), ("hidden", 64), ("classes", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", metavar="OUT", help="also write the figures there")
    return parser.parse_args()


def cases_of(options: argparse.Namespace, folder: str) -> tuple[list[Case], list[tuple[str, Case]]]:
    """All cases, and (side, case) of each process."""
    wanted = [(graph, model, side) for graph in options.graphs for model in options.models for side in options.sides]
    wanted += [tuple(each.rsplit(":", 2)) for each in options.also]
    cases: dict[str, Case] = {}
    for graph in dict.fromkeys(graph for graph, _, _ in wanted):
        models = list(dict.fromkeys(model for name, model, _ in wanted if name == graph))
        given = argparse.Namespace(**(vars(options) | {"graphs": [graph], "models": models}))
        cases |= {case.name: case for case in make_cases(given, folder)}
    return list(cases.values()), [(side, cases[f"{Path(graph).stem}/{model}"]) for graph, model, side in wanted]


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    threads = options.threads or torch.get_num_threads()
    where = clocks_under_load() if options.device == "cuda" else f"on the CPU, {threads} thread(s)"
    head = provenance(options.commit, where)
    print(*head, sep="\n", flush=True)
    deadline, servers = START + options.budget, []
    with tempfile.TemporaryDirectory() as folder:
        cases, own = cases_of(options, folder)
        outcomes = {(side, case.name): Outcome() for side, case in own}
        try:
            most, ready = options.at_once or len(own), []
            for first in range(0, len(own), most):
                some = [Server(side, case, options, folder) for side, case in own[first : first + most]]
                servers += some
                ready += wait_until_made(some, outcomes, deadline - options.measuring)
            ready.sort(key=lambda server: (server.case.name, alone(server.side)))
            take_turns(ready, outcomes, options.turns, deadline)
        finally:
            for server in servers:
                server.stop()
    rows, failures = rows_of(outcomes, cases)
    lines = means(rows)
    if options.csv:
        save_table(
            options.csv, head + [f"# {line}" for line in lines], COLUMNS,
            [[short(row.get(column)) for column in COLUMNS] for row in rows],
        )  # fmt: skip
    for row in rows:
        print(*(short(row.get(column)) for column in COLUMNS), sep="  ")
    print(*lines, sep="\n", flush=True)
    if failures:
        raise SystemExit("FAILED\n" + "\n".join(failures))


START = time.monotonic()

if __name__ == "__main__":
    main()
