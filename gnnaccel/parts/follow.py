"""A model on all ranks as one: equal parameters to begin with, gradients summed after each backward pass, batch norms
over all nodes.

Gradients go in one all-reduce at the end of a backward pass, all parameters in a fixed order, whatever each rank's own
kernels made of the order in which they came. Not DistributedDataParallel: that takes means over ranks, renames
parameters in checkpoints, and sends buckets in between the exchanges of halo rows; graph networks have few parameters.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy

from gnnaccel import touch
from gnnaccel.parts import exchange, ranks


def follow(model: torch.nn.Module, device: torch.device) -> None:
    """Give `model` the parameters of rank 0, and its gradients the sum over ranks.

    Raises
    ------
    ValueError
        For parameters without a shape yet, or on another device. RuntimeError: if the ranks' models differ.
    """
    if touch.backward_engine is None:
        raise RuntimeError(f"wrap: model: torch {torch.__version__} does not say when a backward pass is done")
    named = list(model.named_parameters()) + list(model.named_buffers())
    for name, tensor in named:
        if is_lazy(tensor):
            raise ValueError(f"wrap: model: {name} has no shape yet: give its layer the number of in_channels")
        if tensor.device != device:
            raise ValueError(
                f"wrap: model: {name} is on {tensor.device}, and the part on {device}: model.to(part.device)"
            )
    shapes = repr([(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in named])
    digest = hashlib.sha256(shapes.encode()).hexdigest()
    count = sum(tensor.numel() for _, tensor in named)
    halves = [int(digest[at : at + 15], 16) for at in (0, 15, 30)]
    ranks.same_everywhere(halves, device, "wrapping the model", f"a model of {count:,} parameters and buffers")
    with torch.no_grad(), ranks.told("sending the parameters of rank 0"):
        for _, tensor in named:
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, 0)
            tensor.copy_(whole)
    _Gradients([p for p in model.parameters() if p.requires_grad], model)


class _Gradients:
    """The gradients of one backward pass, from the first that comes to their sums over ranks."""

    def __init__(self, parameters: list[torch.nn.Parameter], model: torch.nn.Module):
        self._parameters = parameters
        self._given: dict[int, tuple[Tensor | None, Tensor]] = {}  # what a parameter had before, and what is added
        self._done: set[int] = set()
        for number, parameter in enumerate(parameters):
            parameter.register_hook(lambda grad, number=number: self._before(number, grad))
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._after(number))
        model.register_forward_pre_hook(self._forget)

    def _forget(self, *_: Any) -> None:
        """What a backward pass has left that did not come to its end."""
        if touch.graph_task() == -1:
            self._given.clear()
            self._done.clear()

    def _before(self, number: int, grad: Tensor) -> None:
        had = self._parameters[number].grad
        if grad.layout is not torch.strided:
            raise RuntimeError(
                "gnnaccel.distributed: sparse gradients (Embedding(sparse=True)) are not summed over ranks"
            )
        self._given[number] = None if had is None else had.clone(), grad

    def _after(self, number: int) -> None:
        if not self._done:
            touch.backward_engine.queue_callback(self._sum)
        self._done.add(number)

    def _sum(self) -> None:
        given = {number: self._given[number] for number in self._done}
        self._given.clear()
        self._done.clear()
        for dtype in sorted({p.dtype for p in self._parameters}, key=str):
            numbers = [n for n, p in enumerate(self._parameters) if p.dtype == dtype]
            self._sum_of(numbers, given)

    @torch.no_grad()
    def _sum_of(self, numbers: list[int], given: dict[int, tuple[Tensor | None, Tensor]]) -> None:
        """Behind the gradients: on how many ranks each parameter had one."""
        parameters = [self._parameters[number] for number in numbers]
        sizes = [p.numel() for p in parameters]
        complete = given.keys() >= set(numbers)
        # No number goes to the device from the host, which would wait for all that is queued there.
        had = parameters[0].new_full((len(sizes),), float(complete))
        pieces = []
        for at, (number, parameter) in enumerate(zip(numbers, parameters, strict=True)):
            if number in given:
                pieces.append(given[number][1].reshape(-1).to(parameter.dtype))
                if not complete:
                    had[at].fill_(1)
            else:
                pieces.append(parameter.new_zeros(parameter.numel()))
        *pieces, had = ranks.summed(torch.cat([*pieces, had])).split([*sizes, len(sizes)])
        everywhere = [True] * len(numbers) if complete else (had > 0).tolist()
        targets, totals = [], []
        for number, parameter, piece, there in zip(numbers, parameters, pieces, everywhere, strict=True):
            if not there:
                continue
            total = piece.view_as(parameter)
            if parameter.grad is None:
                parameter.grad = total.clone()
            elif number not in given:
                parameter.grad.add_(total)
            else:
                before = given[number][0]
                targets.append(parameter.grad)
                totals.append(total if before is None else before.add_(total))
        if targets:
            touch.foreach_copy(targets, totals)


class BatchNorm:
    """The forward() of a batch norm whose statistics are those of all ranks' rows; SyncBatchNorm is for CUDA alone.

    Parameters
    ----------
    norm : torch.nn.BatchNorm1d
        Rows of nodes [N, C]. Its parameters, buffers and name in checkpoints stay.
    """

    def __init__(self, norm: torch.nn.BatchNorm1d):
        self.norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        norm = self.norm
        if not (norm.training or norm.running_mean is None):
            return type(norm).forward(norm, x)
        if x.dim() != 2 or x.shape[1] != norm.num_features:
            raise ValueError(f"BatchNorm: expected rows of nodes [N, {norm.num_features}], got {tuple(x.shape)}")
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        count = ranks.summed(x.new_full((1,), x.shape[0], dtype=torch.float64)).to(wide.dtype)
        mean = exchange.shared(wide.sum(0)) / count
        centred = wide - mean
        var = exchange.shared((centred * centred).sum(0)) / count
        if norm.training and norm.track_running_stats:
            self._note(mean.detach(), var.detach() * (count / (count - 1).clamp(min=1)))
        out = centred * torch.rsqrt(var + norm.eps)
        if norm.affine:
            out = torch.addcmul(norm.bias, out, norm.weight)
        return out.to(x.dtype)

    @torch.no_grad()
    def _note(self, mean: Tensor, var: Tensor) -> None:
        norm = self.norm
        assert norm.running_mean is not None and norm.running_var is not None
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        share = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
        norm.running_var.lerp_(var.to(norm.running_var.dtype), share)


def batch_norms(model: torch.nn.Module) -> list[Any]:
    """The batch norms in a model.

    Raises
    ------
    TypeError
        For another norm of torch's over rows (InstanceNorm, BatchNorm2d), which graphs' nodes have no use for.
    """
    found: list[Any] = []
    for name, module in model.named_modules():
        if type(module) in (torch.nn.BatchNorm1d, torch.nn.SyncBatchNorm):
            found.append(module)
        elif isinstance(module, touch.norms):
            raise TypeError(f"wrap: model: {name or 'the model'} is a {type(module).__name__}, not known on parts")
    return found


def over_ranks(norms: list[Any]) -> None:
    """Let these norms see the rows of all ranks."""
    for norm in norms:
        norm.forward = BatchNorm(norm)  # type: ignore[method-assign, assignment]
