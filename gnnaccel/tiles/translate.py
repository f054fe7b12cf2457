"""Sparse graph translation: the tiles that tensor cores multiply (TC-GNN: Wang, Feng and Ding, USENIX ATC 2023).

Rows stand in windows of `height`. The distinct columns of a window, in ascending order, are put side by side and cut
into blocks of `width`: the fewer columns a window's rows have between them, the fuller its blocks. A block is kept as
the sources of its columns and a bitmap of its nonzeros, and the nonzeros are ordered by block, so that a kernel reads
each of them once (the paper's kernels look at all edges of a window for each of its blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds

KERNEL_SIZE = (16, 8)  # of the tiles that the CUDA kernels take: TileConfig of cuda/tiles.cuh
KERNELS = ("auto", "csr", "tiled")  # of ops and of `prepare`: where tiles pay, not by tiles, by tiles


@dataclass(frozen=True)
class Tiles:
    """A translated graph; see Tiles in cpp/types.h.

    Attributes
    ----------
    height, width : int
        Rows of a window, columns of a block.
    edge_columns : Tensor [nnz], the graph's index dtype
        Place of each nonzero's column among those of its window (the paper's edgeToCol). Where a row has a column
        several times, the window has it as often.
    window_ptr : Tensor [num_windows + 1]
        First block of each window; differences are the paper's winPartition.
    columns : Tensor [num_blocks, width]
        Source of each column of each block; -1 past the last of a window.
    bits : Tensor [num_blocks, ceil(height * width / 64)], int64
        Bit r * width + c: row r of the window has column c of the block.
    block_ptr : Tensor [num_blocks + 1]
        First nonzero of each block in `edges`.
    edges : Tensor [nnz]
        Edge ids by block, in a block by bit.
    longest : int
        Blocks that a window has at most.
    """

    height: int
    width: int
    edge_columns: Tensor
    window_ptr: Tensor
    columns: Tensor
    bits: Tensor
    block_ptr: Tensor
    edges: Tensor
    longest: int

    @property
    def num_blocks(self) -> int:
        return self.columns.shape[0]

    @property
    def density(self) -> float:
        """Nonzeros per place of a block; 0 without blocks."""
        places = self.num_blocks * self.height * self.width
        return self.edges.numel() / places if places else 0.0

    def arrays(self) -> list[Tensor]:
        """The tensors it is made of."""
        return [self.edge_columns, self.window_ptr, self.columns, self.bits, self.block_ptr, self.edges]

    def column_reuse(self) -> float:
        """Nonzeros per distinct column of a window: how often a gathered row is used; 0 without nonzeros."""
        distinct = int((self.columns >= 0).sum())
        return self.edges.numel() / distinct if distinct else 0.0

    def team_for(self, features: int, dots: bool = False) -> int:
        """Warps that share a window where rows of `features` numbers are summed up, or multiplied (`dots`).

        A power of two, up to 4 for sums, which a team has to add up in the end, and 8 for products. The paper starts
        from a warp to 32 edges of a window; measured on an H200 (docs/tensor-cores.md): while the GPU is not full, as
        many as have two blocks each; then only where windows are long, for sums far longer.
        """
        windows = max(self.window_ptr.numel() - 1, 1)
        slices = 1 if dots else max(-(-features // bounds.TILE_SLICE), 1)
        most, blocks = bounds.TILE_TEAM // (1 if dots else 2), bounds.TILE_TEAM_BLOCKS["dot" if dots else "sum"]
        team = 1
        while team < most:
            needed = 2 if team * windows * slices < bounds.TILE_BUSY_WARPS else blocks
            if 2 * team * needed * windows > self.num_blocks:
                break
            team *= 2
        return team


def description(arrays: Sequence[Tensor | None], longest: int, height: int, width: int, team: int = 1) -> tuple:
    """Tiles as the binary takes them (types.h: Tiles); arrays: window_ptr, columns, bits, block_ptr, edges."""
    columns = arrays[1]
    assert columns is not None
    num_blocks = columns.shape[0]
    chunk = max(bounds.TILE_CHUNK, 1 << max(-(-num_blocks // bounds.TILE_CHUNKS) - 1, 0).bit_length())
    return (*map(lib.pointer, arrays), num_blocks, longest, height, width, team, chunk)


def translate(graph: Graph, height: int = 16, width: int = 8) -> Tiles:
    """Tiles of `graph` on its device.

    Parameters
    ----------
    graph : Graph
    height : int
        Rows of a window: 16 in the paper; 8 where the sparse side is the narrow operand; 1 gives each row its own.
    width : int
        Columns of a block: what one matrix instruction sums up, 8 in tf32, 16 in 16-bit types.

    Raises
    ------
    ValueError
        For sizes that are not ints from 1 to 1024, or a CUDA graph whose rows times columns do not fit 61 bits.

    Notes
    -----
    On the CPU windows are translated in parallel; on CUDA a radix sort of the nonzeros by window and column does most
    of it. The results are the same. Synchronises with the device once, for the number of blocks.
    """
    for name, value in (("height", height), ("width", width)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= bounds.TILE_SIDE:
            raise ValueError(f"translate: {name}: expected an int from 1 to {bounds.TILE_SIDE}, got {value!r}")
    indptr, nnz = graph.indptr, graph.nnz
    windows = -(-graph.num_rows // height)
    if (
        graph.device.type == "cuda"
        and sum(max(n, 2).bit_length() for n in (windows, height, graph.num_cols)) > bounds.TILE_KEY_BITS
    ):
        raise ValueError(
            f"translate: {graph.num_rows} rows times {graph.num_cols} columns: expected a product below 2^61"
        )
    matrix = lib.csr(indptr, graph.indices, graph.edge_ids, graph.num_cols, nnz)
    edge_columns, window_columns = indptr.new_empty(nnz), indptr.new_empty(windows)
    lib.launch(
        "translate_columns", graph.device, matrix, height, lib.pointer(edge_columns), lib.pointer(window_columns)
    )
    window_ptr = indptr.new_zeros(windows + 1)
    torch.cumsum((window_columns + (width - 1)).div_(width, rounding_mode="floor"), 0, out=window_ptr[1:])
    most = window_columns.max() if windows else window_ptr[0]
    num_blocks, most = torch.stack([window_ptr[-1], most]).tolist()
    words = -(-height * width // 64)
    tiles = Tiles(
        height,
        width,
        edge_columns,
        window_ptr,
        columns=indptr.new_empty(num_blocks, width),
        bits=torch.empty(num_blocks, words, dtype=torch.int64, device=graph.device),
        block_ptr=indptr.new_empty(num_blocks + 1),
        edges=indptr.new_empty(nnz),
        longest=-(-most // width),
    )
    arrays = (tiles.window_ptr, tiles.columns, tiles.bits, tiles.block_ptr, tiles.edges)
    made = description(arrays, tiles.longest, height, width)
    lib.launch("translate_blocks", graph.device, matrix, lib.pointer(edge_columns), made)
    return tiles
