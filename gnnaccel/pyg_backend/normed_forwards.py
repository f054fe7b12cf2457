"""Forwards of PyG's layers that multiply by the matrix of a GCN, once or several times, each product by one op; after
those of PyG 2.8. As forwards.py has them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import report
from gnnaccel.graph.csr import Graph
from gnnaccel.pyg_backend import norms, short
from gnnaccel.pyg_backend.touch import kept_edges, kept_h, kept_x
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.touch import own_parameters, submodules


def _sg(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.SGConv)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_weight=None):
        found = None
        if edge_weight is None and not self.cached and kept_x(self) is None and "lin" in submodules(self):
            found = _matrix(self, guard, x, edge_index, self.add_self_loops)
        if found is None:
            return general(self, x, edge_index, edge_weight)
        for _ in range(self.K):
            x = _product(guard, x, *found)
        return submodules(self)["lin"](x)

    return forward


def _tag(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.TAGConv)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_weight=None):
        modules, parameters, found = submodules(self), own_parameters(self), None
        if edge_weight is None and self.normalize and "lins" in modules and "bias" in parameters:
            found = _matrix(self, guard, x, edge_index, loops=False)
        if found is None:
            return general(self, x, edge_index, edge_weight)
        lins = modules["lins"]
        out = lins[0](x)
        for lin in list(lins)[1:]:
            x = _product(guard, x, *found)
            out = out + lin.forward(x)
        bias = parameters["bias"]
        return out if bias is None else out + bias

    return forward


def _appnp(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.APPNP)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_weight=None):
        found, alpha = None, self.alpha
        drops = self.dropout > 0 and self.training
        if edge_weight is None and self.normalize and not self.cached and not drops and type(alpha) in (float, int):
            found = _matrix(self, guard, x, edge_index, self.add_self_loops)
        if found is None or kept_edges(self) is not None:
            return general(self, x, edge_index, edge_weight)
        own = x
        for _ in range(self.K):
            x = torch.add(_product(guard, x, *found) * (1 - alpha), own, alpha=alpha)
        return x

    return forward


def _ssg(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.SSGConv)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_weight=None):
        found, alpha = None, self.alpha
        usual = edge_weight is None and not self.cached and kept_h(self) is None and "lin" in submodules(self)
        if usual and type(alpha) in (float, int):
            found = _matrix(self, guard, x, edge_index, self.add_self_loops)
        if found is None:
            return general(self, x, edge_index, edge_weight)
        out = x * alpha
        for _ in range(self.K):
            x = _product(guard, x, *found)
            out = torch.add(out, x, alpha=(1 - alpha) / self.K)
        return submodules(self)["lin"](out)

    return forward


def _lg(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.LGConv)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_weight=None):
        found = None
        if edge_weight is None and self.normalize:
            found = _matrix(self, guard, x, edge_index, loops=False)
        return general(self, x, edge_index, edge_weight) if found is None else _product(guard, x, *found)

    return forward


def _mix_hop(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.MixHopConv)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_weight=None):
        modules, parameters, found = submodules(self), own_parameters(self), None
        if edge_weight is None and "lins" in modules and "bias" in parameters:
            found = _matrix(self, guard, x, edge_index, self.add_self_loops)
        if found is None:
            return general(self, x, edge_index, edge_weight)
        lins = modules["lins"]
        outs = [lins[0](x)]
        for lin in list(lins)[1:]:
            x = _product(guard, x, *found)
            outs.append(lin.forward(x))
        out, bias = torch.cat([outs[power] for power in self.powers], dim=-1), parameters["bias"]
        return out if bias is None else out + bias

    return forward


def _gcn2(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.GCN2Conv)

    @functools.wraps(general)
    def forward(self, x, x_0, edge_index, edge_weight=None):
        parameters, found, alpha = own_parameters(self), None, self.alpha
        usual = edge_weight is None and self.normalize and not self.cached and kept_edges(self) is None
        usual = usual and parameters.keys() >= {"weight1", "weight2"} and type(alpha) in (float, int)
        usual = usual and short.is_matrix(x) and short.is_matrix(x_0)
        # PyG adds x_0 in place, which has the dtype and the shape of the sums stay.
        if usual and x_0.dtype == x.dtype and x_0[: x.shape[0]].shape == x.shape:
            found = _matrix(self, guard, x, edge_index, self.add_self_loops)
        if found is None:
            return general(self, x, x_0, edge_index, edge_weight)
        of_sums, of_own, how = parameters["weight1"], parameters["weight2"], dict(beta=1.0 - self.beta, alpha=self.beta)
        sums, own = _product(guard, x, *found) * (1 - alpha), alpha * x_0[: x.shape[0]]
        if of_own is None:
            sums = sums + own
            return torch.addmm(sums, sums, of_sums, **how)
        return torch.addmm(sums, sums, of_sums, **how) + torch.addmm(own, own, of_own, **how)

    return forward


_ACTS = (torch.nn.ReLU, torch.nn.ELU, torch.nn.LeakyReLU, torch.nn.Tanh, torch.nn.Sigmoid, torch.nn.GELU, torch.nn.SiLU)


def _arma(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.ARMAConv, node_dims=(-2,))

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_weight=None):
        parameters, found = own_parameters(self), None
        usual = edge_weight is None and parameters.keys() >= {"init_weight", "weight", "root_weight", "bias"}
        # Another act may give what are no rows of nodes.
        act = self.act
        usual = usual and (act is None or (type(act) in _ACTS and not short.hooked(act)))
        if usual and parameters["init_weight"].dim() == 3:
            found = _matrix(self, guard, x, edge_index, loops=False)
        if found is None:
            return general(self, x, edge_index, edge_weight)
        init_weight, weight, root_weight, bias = map(parameters.get, ("init_weight", "weight", "root_weight", "bias"))
        out = x = x.unsqueeze(-3)
        for t in range(self.num_layers):
            last, this = (0, 0) if self.shared_weights else (t - 1, t)
            out = out @ (init_weight if t == 0 else weight[last])  # [stacks, N, channels]
            sums = _product(guard, out.transpose(0, 1).flatten(1), *found)
            out = sums.unflatten(1, (-1, out.shape[2])).transpose(0, 1)
            out = out + F.dropout(x, p=self.dropout, training=self.training) @ root_weight[this]
            out = out if bias is None else out + bias[this]
            out = out if act is None else act(out)
        return out.mean(dim=-3)

    return forward


def _matrix(conv: Any, guard: short.Guard, x: Any, edge_index: Any, loops: bool) -> tuple[Graph, Tensor] | None:
    """`short.normed` of a plain call; None where the general way is to be taken."""
    if not short.is_matrix(x) or x.dtype not in norms.DTYPES or not guard.allows(conv, edge_index):
        return None
    if x.device != edge_index.device or torch.is_autocast_enabled(x.device.type):
        return None
    return short.normed(edge_index, x.shape[0], conv.flow, loops, x.dtype)


def _product(guard: short.Guard, x: Tensor, graph: Graph, scale: Tensor) -> Tensor:
    """One propagate()."""
    start = time.perf_counter()
    out = norms.scaled_sum(graph, x, scale, None)
    report.record(guard.kind, start)
    return out


_MAKERS = (
    (pyg_nn.SGConv, _sg),
    (pyg_nn.TAGConv, _tag),
    (pyg_nn.APPNP, _appnp),
    (pyg_nn.SSGConv, _ssg),
    (pyg_nn.LGConv, _lg),
    (pyg_nn.MixHopConv, _mix_hop),
    (pyg_nn.GCN2Conv, _gcn2),
    (pyg_nn.ARMAConv, _arma),
)
FORWARDS: dict[Callable, Callable] = {layer.forward: maker for layer, maker in _MAKERS}
"""forward() of a layer of PyG's -> what makes a short one of a class that has it, and of its general one."""
short.know(*(layer for layer, _ in _MAKERS))
