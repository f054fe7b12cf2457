"""The DGL examples on the CPU and on CUDA: the same accuracy, and without dropout the same losses.

    python benchmarks/dgl_accuracy.py --folder FOLDER_OF_NPZ_FILES --csv out.csv

Runs each script of examples/ unmodified, under the flag, for every graph (Cora and CiteSeer are in the package; others
are NAME.npz of --folder). Devices draw different dropouts, so losses are compared in a second pair of runs in which a
dropout changes nothing.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from timing import provenance

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# script -> its own options
SCRIPTS = {"dgl_gcn.py": (), "dgl_gat.py": (), "dgl_sage_sampled.py": ("--batch-size=256",)}
# Runs a script whose dropouts change nothing; its arguments are the script and the script's own.
WITHOUT_DROPOUT = """
import runpy, sys, torch
torch.nn.functional.dropout = lambda x, *args, **kwargs: x
torch.nn.Dropout.forward = lambda self, x: x
sys.argv = sys.argv[1:]
sys.path.insert(0, '.')
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def run(script: str, *options: str, dropout: bool) -> tuple[float, list[float]]:
    """Test accuracy and the losses of one run."""
    with tempfile.TemporaryDirectory() as folder:
        losses = Path(folder, "losses")
        words = [script, *options, f"--log-losses={losses}"]
        if not dropout:
            without = Path(folder, "without_dropout.py")
            without.write_text(WITHOUT_DROPOUT)
            words = [str(without), *words]
        env = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "2"}
        words = [sys.executable, "-m", "gnnaccel", *words]
        done = subprocess.run(words, cwd=EXAMPLES, env=env, capture_output=True, text=True)
        found = re.search(r"test accuracy ([\d.]+)", done.stdout)
        if done.returncode or not found:
            raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()[-2000:]}")
        return float(found[1]), [float(line) for line in losses.read_text().split()]


def compare(graph: str, data: str, script: str, epochs: int) -> dict:
    """One row of the table."""
    row, losses = {"graph": graph, "script": script, "epochs": epochs}, {}
    for device in ("cpu", "cuda"):
        options = (f"--data={data}", f"--epochs={epochs}", f"--device={device}", *SCRIPTS[script])
        row[f"accuracy_{device}"], _ = run(script, *options, dropout=True)
        row[f"accuracy_{device}_no_dropout"], losses[device] = run(script, *options, dropout=False)
    pairs = zip(losses["cpu"], losses["cuda"], strict=True)
    row["largest_loss_difference"] = f"{max(abs(a - b) for a, b in pairs):.2g}"
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=["cora", "citeseer", "amazon_computers", "tolokers"])
    parser.add_argument("--scripts", nargs="+", default=list(SCRIPTS), choices=SCRIPTS)
    parser.add_argument("--folder", type=Path, help="of NAME.npz for graphs that the package does not hold")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--commit", default="")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    jobs = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for graph in args.graphs:
            outside = args.folder and args.folder / f"{graph}.npz"
            data = str(outside.resolve()) if outside and outside.is_file() else graph
            jobs += [pool.submit(compare, graph, data, script, args.epochs) for script in args.scripts]
        rows = [job.result() for job in jobs]
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            file.writelines(line + "\n" for line in provenance(args.commit))
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
