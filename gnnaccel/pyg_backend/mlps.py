"""Two linear maps with a ReLU, and perhaps a batch norm, between them, as users and PyG's models write them: one op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv.gen_conv import MLP

from gnnaccel.modules import is_as_made
from gnnaccel.ops.normed_layers import normed_by
from gnnaccel.pyg_backend import short
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.touch import submodules

_SEQUENCES = (torch.nn.Sequential, MLP)
_NORMS = (torch.nn.BatchNorm1d, pyg_nn.BatchNorm)
_FORWARDS: dict[type, Callable] = {
    cls: cls.forward for cls in (*_SEQUENCES, pyg_nn.MLP, *_NORMS, torch.nn.Identity, torch.nn.ReLU, torch.nn.Dropout)
}


def mapped(nn: Any, x: Tensor) -> Tensor:
    """nn(x), of a layer that a guard allows and features [N, F] on which nobody waits."""
    found = _parts(nn) if _is_plain(nn) else None
    if found is not None:
        first, norm, last, others = found
        maps, last_maps = short.parameters_of(first), short.parameters_of(last)
        if type(norm) is pyg_nn.BatchNorm:
            norm = norm.module
        fits = norm is None or (type(norm) is torch.nn.BatchNorm1d and _is_plain(norm))
        if fits and maps is not None and last_maps is not None:
            out = normed_by(x, maps, norm, last_maps)
            if out is not None:
                for module in others:
                    out = module(out)
                return out
    return nn(x)


def _parts(nn: Any) -> tuple[Any, Any, Any, Sequence[Any]] | None:
    """The first map, the norm or None, the second map, and what is behind; None of anything else."""
    if type(nn) is pyg_nn.MLP:
        if len(nn.lins) != 2 or len(nn.norms) != 1 or not nn.plain_last or nn.act_first or nn.supports_norm_batch:
            return None
        if nn.training and any(nn.dropout):
            return None
        first, norm, relu, dropout, last, others = nn.lins[0], nn.norms[0], nn.act, None, nn.lins[1], []
        if type(norm) is torch.nn.Identity and _is_plain(norm):
            norm = None
    else:
        modules = list(submodules(nn).values())
        if None in modules:
            return None
        if len(modules) > 1 and type(modules[1]) is torch.nn.ReLU:
            modules.insert(1, None)
        if len(modules) < 4:
            return None
        dropout = modules.pop(3) if type(modules[3]) is torch.nn.Dropout and len(modules) > 4 else None
        first, norm, relu, last, *others = modules
    if norm is not None and (type(norm) not in _NORMS or not _is_plain(norm)):
        return None
    if type(relu) is not torch.nn.ReLU or not _is_plain(relu):
        return None
    if dropout is not None and (not _is_plain(dropout) or (dropout.training and dropout.p)):
        return None
    return first, norm, last, others


def _is_plain(module: Any) -> bool:
    """True for a module of these classes that nobody watches, compiles or has changed."""
    return is_as_made(module, _FORWARDS) and not short.hooked(module)
