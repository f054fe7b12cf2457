"""Tiles of a graph, by which tensor cores multiply, and whether they pay: docs/tensor-cores.md."""

from gnnaccel.tiles.gate import are_profitable, ensure, of
from gnnaccel.tiles.translate import KERNEL_SIZE, KERNELS, Tiles

__all__ = ["KERNELS", "KERNEL_SIZE", "Tiles", "are_profitable", "ensure", "of"]
