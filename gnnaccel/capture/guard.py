"""What a capture was made of: whether a replay finds all of that as it was."""

from __future__ import annotations

import operator
import threading
from typing import Any

import torch
from torch import Tensor

from gnnaccel import _precision
from gnnaccel.capture.device import Recording
from gnnaccel.capture.reach import Reach
from gnnaccel.capture.watch import Masks
from gnnaccel.graph.cache import derived

within = threading.local()  # running: whether a captured step or module runs on this thread


class Unfit(Exception):
    """What was recorded, or would be, cannot be replayed."""


class Warm:
    """Calls with the same kinds of arguments that no capture serves."""

    def __init__(self, leaves: list, key: Any = None):
        self.leaves = leaves  # of the last one
        self.key = key  # of what they have in common
        self.calls = 0
        self.fixed = [True] * len(leaves)  # whether they were the same objects at each call
        self.masks = Masks([])  # of the call that was watched
        self.reach: Reach | None = None  # of that call
        self.values: list = []  # what it returned beside tensors
        self.switched: list[torch.nn.Module] = []  # modules that the step itself sets to train or evaluate

    def note(self, leaves: list) -> None:
        """One more call, with these arguments."""
        self.fixed = [fixed and a is b for fixed, a, b in zip(self.fixed, leaves, self.leaves, strict=True)]
        self.leaves = leaves
        self.calls += 1

    def forget(self) -> None:
        """Let go of arguments that were others at each call."""
        self.leaves = [x if fixed else None for x, fixed in zip(self.leaves, self.fixed, strict=True)]

    def moving(self) -> list[Tensor]:
        """Tensors as arguments that were others at each call."""
        pairs = zip(self.leaves, self.fixed, strict=True)
        return [x for x, fixed in pairs if isinstance(x, Tensor) and not fixed]


class Guard:
    """What a recording reads, as it is before it is made; `settle` ends that.

    Parameters
    ----------
    reach : Reach
        Of what is recorded, with the arguments that are the same at each call.
    inputs, form, modes
        Its arguments as leaves of a tree, that tree, and the modes of torch it runs in.
    warm : Warm
        Of the calls before.

    Attributes
    ----------
    written : list of Tensor
        That the recording wrote into, once it is settled.
    """

    def __init__(self, reach: Reach, inputs: list, warm: Warm, form: Any, modes: tuple):
        self._reach, self._inputs, self._fixed, self._form, self._modes = reach, inputs, warm.fixed, form, modes
        self._masks = warm.masks  # whose row numbers the graph reads
        self._meta = [meta(x) for x in inputs]
        self._versions, self._places = _versions(reach), places_of(reach)
        self._required = [x.requires_grad for _, x in reach.tensors]
        # What the host has read, or kept something of: numbers on the CPU, graphs, masks.
        self._read = {id(x) for _, x in reach.tensors if is_structure(x) or not Recording.takes(x)}
        self._read |= warm.masks.tensors()
        self.written: list[Tensor] = []

    def changed(self, ignored: Any = ()) -> str | None:
        """The name of what the recording itself has changed or moved, but for entries (dict, key) `ignored`."""
        return self._reach.difference(ignored) or moved(self._reach, self._places)

    def settle(self) -> list[tuple[Tensor, bool]]:
        """Note what was recorded; gives (tensor, requires_grad) of those of which the recording set it."""
        reach = self._reach
        self.written = [x for x, version in self._versions if x._version != version]
        written = set(map(id, self.written))
        self._tensors = [x for _, x in reach.tensors]
        self._dense = [x for x in self._tensors if x.layout is torch.strided]
        self._addresses = _addresses(self._dense)
        self._sparse = [
            (x, place) for x, place in zip(self._tensors, self._places, strict=True) if x.layout is not torch.strided
        ]
        kept = [(name, x) for name, x in reach.tensors if id(x) in self._read - written and not x.is_inference()]
        # What is not to be written into, nor to be forgotten by what was made of it, which the recording reads.
        self._structure = [(name, x, x._version, derived.mark(x)) for name, x in kept]
        self._made = [derived.made_of(x) for _, x in kept]
        pairs = zip(self._tensors, self._required, strict=True)
        return [(x, x.requires_grad) for x, was in pairs if x.requires_grad is not was]

    def mismatch(self, leaves: list, form: Any, modes: tuple) -> str | None:
        """What is another than when this was recorded; None if all is as it was."""
        if form != self._form:
            return "the form of its arguments"
        if modes != self._modes:
            return "a mode of torch (grad, autocast, deterministic, dtype)"
        for i, (now, kept, fixed) in enumerate(zip(leaves, self._inputs, self._fixed, strict=True)):
            if isinstance(kept, Tensor) and not fixed:
                if meta(now) != self._meta[i] or is_structure(now):
                    return f"the shape of argument {i}"
            elif now is not kept and not (fixed_value(kept) and type(now) is type(kept) and now == kept):
                return f"argument {i}"
        changed = self._reach.difference()
        if changed is not None:
            return changed
        required = list(map(_requires_grad, self._tensors))
        lie_elsewhere = _addresses(self._dense) != self._addresses
        if lie_elsewhere or required != self._required or any(_place(x) != place for x, place in self._sparse):
            return next(
                (name for (name, x), now, then, place in zip(
                    self._reach.tensors, required, self._required, self._places, strict=True)
                 if now is not then or _place(x) != place), "a tensor")  # fmt: skip
        for name, tensor, version, mark in self._structure:
            if tensor._version != version or (mark is not None and derived.mark(tensor) is not mark):
                return name
        return None


def meta(leaf: Any) -> Any:
    """What must be the same of an argument for two calls to be alike."""
    if isinstance(leaf, Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else None
        return type(leaf), leaf.dtype, leaf.device, leaf.shape, strides, leaf.requires_grad
    return leaf if fixed_value(leaf) else (type(leaf), id(leaf))


def fixed_value(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device))


def is_structure(value: Any) -> bool:
    """True of a tensor that a graph, or a graph's norms, were made of."""
    return isinstance(value, Tensor) and derived.holds(value)


_requires_grad = operator.attrgetter("requires_grad")
_form = operator.attrgetter("shape", "dtype")


def _addresses(tensors: list[Tensor]) -> tuple[list[int], list[tuple], list[tuple]]:
    """Where tensors lie, and in what form: by few calls into C."""
    return list(map(Tensor.data_ptr, tensors)), list(map(Tensor.stride, tensors)), list(map(_form, tensors))


_PARTS = {
    torch.sparse_coo: (Tensor._indices, Tensor._values),
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
}


def _place(tensor: Tensor) -> tuple:
    """Where a tensor, or the parts of a sparse one, lie, and in what form."""
    if tensor.layout is torch.strided:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    parts = [part(tensor.detach()) for part in _PARTS.get(tensor.layout, ())]
    return tuple((x.data_ptr(), x.shape) for x in parts), tensor.shape


def places_of(reach: Reach) -> list[tuple]:
    return [_place(x) for _, x in reach.tensors]


def moved(reach: Reach, places: list[tuple]) -> str | None:
    """The name of a tensor that lies elsewhere than it did."""
    pairs = zip(reach.tensors, places, strict=True)
    return next((name for (name, x), place in pairs if _place(x) != place), None)


def modes_now() -> tuple:
    """The modes of torch that what is recorded depends on."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        *_precision.settings(),
    )


def _versions(reach: Reach) -> list[tuple[Tensor, int]]:
    return [(x, x._version) for _, x in reach.tensors if not x.is_inference()]
