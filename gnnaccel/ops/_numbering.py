"""Values of edges that nobody outside a layer sees, on CUDA in the order of the nonzeros.

By edge id, as a layer's users have them, kernels look each value up or write it to where its id says, and move 32 bytes
for 4 (docs/advisor.md, values of edges). By nonzero only those of the transposed graph do. No sum takes another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from gnnaccel.lower import choose
from gnnaccel.ops._arrays import Structure
from gnnaccel.ops._edge_order import gather_edge_values, say_no_memory, scatter_edge_values, try_empty_like


def numbered(
    arrays: Structure, edge_scale: Tensor | None, keep: bool
) -> tuple[Structure, Tensor | None, Tensor | None]:
    """The structure and edge_scale [nnz, ...] that a layer is to work with: by nonzero, or as given.

    They are by nonzero on CUDA: where there will be a backward pass (`keep`) of a graph that lasts, which then keeps an
    index per edge; not for the first time while a CUDA graph is captured. The third is for ctx to save beside
    edge_scale as given, and says how the saved values are numbered. What ctx knows is no help: torch.utils.checkpoint
    has a backward pass read what a later forward saved, before which the graph may have proved to last.
    """
    if _stays(arrays):
        return arrays, edge_scale, None
    by_nonzero, ids = _by_nonzero(arrays, keep), arrays.edge_ids
    if by_nonzero is not None and edge_scale is not None and ids is not None:
        if ordered := try_empty_like(edge_scale):
            edge_scale = gather_edge_values(edge_scale, ids, *ordered)
        else:
            by_nonzero = None
    mark = _mark(by_nonzero is not None) if keep else None
    return (arrays if by_nonzero is None else by_nonzero), edge_scale, mark


def numbered_alike(structures: Sequence[Structure], keep: bool) -> tuple[list[Structure], Tensor | None]:
    """`numbered` without an edge_scale of structures among which values of edges go round: all of them, or none.

    The first has the edges of all others, those of one behind those of another, by id and by nonzero.
    """
    if _stays(structures[0]):
        return [*structures], None
    first, *others = structures
    found = [_by_nonzero(first, keep)]
    if found[0] is not None:
        found += [_by_nonzero(each, keep, lasts=True) for each in others]
    by_nonzero = [each for each in found if each is not None]
    complete = len(by_nonzero) == len(structures)
    return (by_nonzero if complete else [*structures]), _mark(complete) if keep else None


def _stays(arrays: Structure) -> bool:
    """True where there is nothing to number anew, or on the CPU."""
    ids = arrays.edge_ids
    return ids is None or not ids.is_cuda or ids.shape[0] != arrays.nnz  # ids with gaps: values of another shape


def _by_nonzero(arrays: Structure, keep: bool, lasts: bool = False) -> Structure | None:
    if arrays.edge_ids is None:
        return arrays
    if not keep:
        return arrays.by_nonzero()
    places = _earned(arrays, lasts)
    return None if places is None else arrays.by_nonzero_both_ways(places)


def numbered_as(mark: Tensor | None, arrays: Structure, edge_scale: Tensor | None) -> tuple[Structure, Tensor | None]:
    """In the backward pass what `numbered` gave beside this mark."""
    ids = arrays.edge_ids
    if mark is None or ids is None or not mark:
        return arrays, edge_scale
    if edge_scale is not None:
        ordered = torch.empty_like(edge_scale, memory_format=torch.contiguous_format)
        edge_scale = gather_edge_values(edge_scale, ids, ordered)
    kept = None if arrays.numbering is None else arrays.numbering.places
    return arrays.by_nonzero_both_ways(_places(arrays) if kept is None else kept), edge_scale


@cache
def _mark(by_nonzero: bool) -> Tensor:
    """On the CPU, where it is read."""
    with torch.inference_mode(False):
        return torch.tensor(by_nonzero, device="cpu")


def _earned(arrays: Structure, lasts: bool) -> Tensor | None:
    """`Numbering.places` of a graph that has proved to last, or is known to."""
    numbering = arrays.numbering
    if numbering is None or numbering.places is not None:
        return None if numbering is None else numbering.places
    if numbering.refused or (choose.is_new(numbering.age) and not lasts) or torch.cuda.is_current_stream_capturing():
        return None
    try:
        places = _places(arrays)
        torch.cuda.current_stream(places.device).synchronize()  # another stream may be the one that reads
        numbering.places = places
    except torch.OutOfMemoryError:
        numbering.refused = True
        say_no_memory()
    return numbering.places


def _places(arrays: Structure) -> Tensor:
    ids, others = arrays.edge_ids, arrays.transposed().edge_ids
    assert ids is not None
    with torch.inference_mode(False), torch.no_grad():
        nonzeros = torch.arange(ids.shape[0], dtype=ids.dtype, device=ids.device)
        by_id = scatter_edge_values(nonzeros, ids, torch.empty_like(nonzeros))
        return by_id if others is None else by_id.index_select(0, others)
