"""Tiles of a graph, by which tensor cores multiply, and whether they pay: docs/tensor-cores.md."""

from gnnaccel.tiles.gate import of, pay, serve
from gnnaccel.tiles.translate import KERNEL_SIZE, METHODS, Tiles

__all__ = ["KERNEL_SIZE", "METHODS", "Tiles", "of", "pay", "serve"]
