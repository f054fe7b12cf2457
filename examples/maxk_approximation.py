"""MaxK as the only nonlinearity: an MLP with one hidden layer fits y = x^2 the better the more hidden units it has.

python maxk_approximation.py --hidden 4 8 16 32 64 --plot square.png

Beside it the same MLP with ReLU. MaxK keeps a quarter of the hidden units of each point, rounded up. The fit with MaxK
is linear in pieces, with a jump where another unit is kept; with more units the pieces are shorter and the jumps
smaller. After Figure 4 of MaxK-GNN (Peng et al., ASPLOS 2024).
"""

import argparse
import math
import statistics

import torch
import torch.nn.functional as F

from gnnaccel import ops


class MLP(torch.nn.Module):
    """One hidden layer. k: MaxK keeps so many of its units; None: ReLU."""

    def __init__(self, hidden, k=None):
        super().__init__()
        self.first = torch.nn.Linear(1, hidden)
        self.last = torch.nn.Linear(hidden, 1)
        self.k = k

    def forward(self, x):
        h = self.first(x)
        return self.last(h.relu() if self.k is None else ops.maxk(h, self.k))  # a CBSR tensor is a dense one to Linear


def fit(model, x, y, steps, lr):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return model(x)


def plot(path, x, y, fits):
    """One picture for ReLU and one for MaxK, with a line per hidden size. fits: {(name, hidden): fitted y}."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, pictures = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for picture, name in zip(pictures, ("ReLU", "MaxK"), strict=True):
        picture.plot(x, y, color="black", linestyle="--", label="y = x^2")
        for (of, hidden), fitted in fits.items():
            if of == name:
                picture.plot(x, fitted, label=f"{hidden} hidden units")
        picture.set_title(f"MLP with {name}")
        picture.set_xlabel("x")
        picture.legend()
    figure.savefig(path, bbox_inches="tight", dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", nargs="+", type=int, default=[4, 8, 16, 32, 64], help="hidden units")
    parser.add_argument("--points", type=int, default=201, help="from -1 to 1, to fit and to measure the error on")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="fits of each; the median error counts")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the fits of the first seed")
    args = parser.parse_args()

    x = torch.linspace(-1, 1, args.points).unsqueeze(1)
    y = x.square()
    fits = {}
    print("root of the mean squared error (and the largest error) of y = x^2 on [-1, 1]")
    print(f"{'hidden':>6} {'k':>4} {'ReLU':>20} {'MaxK':>20}")
    for hidden in args.hidden:
        k = math.ceil(hidden / 4)
        cells = []
        for name, kept in (("ReLU", None), ("MaxK", k)):
            roots, largest = [], []
            for seed in range(args.seeds):
                torch.manual_seed(seed)
                fitted = fit(MLP(hidden, kept), x, y, args.steps, args.lr)
                fits.setdefault((name, hidden), fitted.flatten())
                roots.append(float(F.mse_loss(fitted, y).sqrt()))
                largest.append(float((fitted - y).abs().max()))
            cells.append(f"{statistics.median(roots):.5f} ({statistics.median(largest):.5f})")
        print(f"{hidden:6} {k:4} {cells[0]:>20} {cells[1]:>20}", flush=True)
    if args.plot:
        plot(args.plot, x.flatten(), y.flatten(), fits)
        print(f"the fits are drawn in {args.plot}")


if __name__ == "__main__":
    main()
