"""Fetches a graph with the framework's own loader, and writes it as one .npz file.

    python export.py --framework pyg --name amazon_computers --out graph.npz

Loaders keep what they download: DGL in its usual folder, PyG below --folder.
"""

from __future__ import annotations

import argparse

import numpy as np

# Name: DGL's class; PyG's class and the arguments after its folder.
LOADERS = {
    "amazon_computers": ("AmazonCoBuyComputerDataset", ("Amazon", "Computers")),
    "amazon_photo": ("AmazonCoBuyPhotoDataset", ("Amazon", "Photo")),
    "coauthor_cs": ("CoauthorCSDataset", ("Coauthor", "CS")),
    "coauthor_physics": ("CoauthorPhysicsDataset", ("Coauthor", "Physics")),
    "cora_full": ("CoraFullDataset", ("CoraFull",)),
    "wikics": ("WikiCSDataset", ("WikiCS",)),
    "flickr": ("FlickrDataset", ("Flickr",)),
    "reddit": ("RedditDataset", ("Reddit",)),
    "roman_empire": ("RomanEmpireDataset", ("HeterophilousGraphDataset", "Roman-empire")),
    "amazon_ratings": ("AmazonRatingsDataset", ("HeterophilousGraphDataset", "Amazon-ratings")),
    "minesweeper": ("MinesweeperDataset", ("HeterophilousGraphDataset", "Minesweeper")),
    "tolokers": ("TolokersDataset", ("HeterophilousGraphDataset", "Tolokers")),
    "questions": ("QuestionsDataset", ("HeterophilousGraphDataset", "Questions")),
}
MASKS = ("train_mask", "val_mask", "test_mask")


def from_dgl(name: str, folder: str) -> dict:
    import dgl.data

    graph = getattr(dgl.data, LOADERS[name][0])(verbose=False)[0]
    masks = {key: graph.ndata[key].bool() for key in MASKS if key in graph.ndata}
    return {
        "edge_index": np.stack([end.numpy() for end in graph.edges()]),
        "x": graph.ndata["feat"].numpy(),
        "y": graph.ndata["label"].numpy(),
        **{key: mask.numpy() for key, mask in masks.items()},
    }


def from_pyg(name: str, folder: str) -> dict:
    import torch_geometric.datasets

    kind, *arguments = LOADERS[name][1]
    data = getattr(torch_geometric.datasets, kind)(f"{folder}/{name}", *arguments)[0]
    return {key: data[key].numpy() for key in ("edge_index", "x", "y", *MASKS) if key in data}


def at_random(y: np.ndarray) -> dict:
    """A split for a graph that has none: 60 % of the labelled nodes to train, 20 % to validate, 20 % to test."""
    order = np.random.default_rng(0).permutation(np.flatnonzero(y >= 0))
    parts = np.split(order, [len(order) * 6 // 10, len(order) * 8 // 10])
    masks = {key: np.zeros(len(y), dtype=bool) for key in MASKS}
    for key, part in zip(MASKS, parts, strict=True):
        masks[key][part] = True
    return masks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=["dgl", "pyg"], required=True)
    parser.add_argument("--name", choices=LOADERS, required=True)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    arrays = {"dgl": from_dgl, "pyg": from_pyg}[given.framework](given.name, given.folder)
    if arrays.get("test_mask") is not None and arrays["test_mask"].ndim == 1:  # WikiCS: one test set for all splits
        arrays.update({key: mask[:, 0] for key, mask in arrays.items() if key in MASKS and mask.ndim == 2})
    has_split = all(key in arrays for key in MASKS)
    if not has_split:
        arrays.update(at_random(arrays["y"]))
        print("split at random")
    np.savez(given.out, **arrays)


if __name__ == "__main__":
    main()
