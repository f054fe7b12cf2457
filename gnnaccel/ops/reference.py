"""Every op in plain torch: the definition the kernels are tested against, and documentation.

These functions gather one message per edge and keep no promise of speed. Arguments are as in the public
ops; graphs are anything with ``indptr``, ``indices``, ``edge_ids``, ``num_rows``, ``num_cols``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gnnaccel.graph.build import rows_of


def edges_of(graph) -> Tensor:
    """Edge id of each nonzero, int64 [nnz]."""
    if graph.edge_ids is None:
        return torch.arange(graph.indices.numel(), device=graph.indptr.device)
    return graph.edge_ids.long()


def _pad(x: Tensor, dims: int) -> Tensor:
    """Features broadcast from the right, rows stay in front: ones go between them."""
    return x.reshape(x.shape[0], *(1,) * (dims - x.dim()), *x.shape[1:])


def _combine(op: str, lhs: Tensor | None, rhs: Tensor | None) -> Tensor:
    """op of the operands of each edge; None stands for the one that a copy does not read."""
    if lhs is None or rhs is None or op in ("copy_lhs", "copy_rhs"):
        copied = rhs if op == "copy_rhs" else lhs
        assert copied is not None, f"{op} lacks an operand"
        return copied
    dims = max(lhs.dim(), rhs.dim())
    lhs, rhs = _pad(lhs, dims), _pad(rhs, dims)
    if op == "dot":
        return (lhs * rhs).sum(-1, keepdim=True)
    return getattr(torch, op)(lhs, rhs)  # add, sub, mul or div


def segment_reduce(x: Tensor, offsets: Tensor, reduce: str, empty_value: float = 0.0) -> Tensor:
    """Reduce rows offsets[i]:offsets[i+1] of x [n, *F] to out [len(offsets) - 1, *F]."""
    rows = rows_of(offsets)
    count = offsets.long().diff().view(-1, *[1] * (x.dim() - 1))
    index = rows.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    # include_self=False keeps the start out of the result, but its backward still shares the gradient of a max or
    # min with a start that equals it: NaN equals nothing.
    out = x.new_full((offsets.numel() - 1, *x.shape[1:]), torch.nan)
    name = {"sum": "sum", "mean": "sum", "max": "amax", "min": "amin"}[reduce]
    out = out.scatter_reduce(0, index, x, name, include_self=False)
    if reduce == "mean":
        out = out / count.clamp(min=1).to(out.dtype)
    return torch.where(count == 0, torch.full_like(out, empty_value), out)


def relational_spmm(graph, x, edge_type, weight, coefficients=None, norm=None, reduce: str = "sum") -> Tensor:
    """The sum over relations r of (reduce over edges of type r of norm * x[u]) @ weight[r]."""
    if coefficients is not None:
        weight = torch.einsum("rb,b...->r...", coefficients, weight)
    if weight.dim() == 4:
        weight = torch.stack([torch.block_diag(*blocks) for blocks in weight])
    x = torch.eye(graph.num_cols, dtype=weight.dtype, device=weight.device) if x is None else x
    message = x[graph.indices.long()]
    if norm is not None:
        message = message * norm[edges_of(graph)].unsqueeze(1)
    types, rows = edge_type.long()[edges_of(graph)], rows_of(graph.indptr)
    out = x.new_zeros(graph.num_rows, weight.shape[2])
    for r in range(weight.shape[0]):
        mine = types == r
        offsets = torch.cat([rows.new_zeros(1), torch.bincount(rows[mine], minlength=graph.num_rows).cumsum(0)])
        out = out + segment_reduce(message[mine], offsets, reduce) @ weight[r]
    return out


def relational_attention(graph, query, key, value, edge_type, key_maps, value_maps, prior=None) -> Tensor:
    """Attention whose keys and values are mapped by the edge's relation and head: all of them are made."""
    rows, cols = rows_of(graph.indptr), graph.indices.long()
    types = edge_type[edges_of(graph)].long()
    mapped = [torch.einsum("ehf,ehfg->ehg", x[cols], maps[types]) for x, maps in ((key, key_maps), (value, value_maps))]
    scores = (mapped[0] * query[rows]).sum(-1) * query.shape[2] ** -0.5
    scores = scores if prior is None else scores * prior[types]
    top = torch.full_like(query[:, :, 0], -torch.inf).index_reduce(0, rows, scores.detach(), "amax")
    shares = (scores - top[rows]).exp()
    shares = shares / torch.zeros_like(top).index_add(0, rows, shares)[rows]
    return value.new_zeros(query.shape[0], *mapped[1].shape[1:]).index_add(0, rows, mapped[1] * shares.unsqueeze(-1))


def segment_matmul(x: Tensor, ptr: Tensor, weight: Tensor) -> Tensor:
    """The rows of each segment of x [n, D] times its matrix of weight [S, D, E], or blocks [S, H, D / H, E / H]."""
    if weight.dim() == 4:
        heads, width = weight.shape[1], weight.shape[3]
        parts = [segment_matmul(part, ptr, weight[:, h]) for h, part in enumerate(x.chunk(heads, 1))]
        return torch.cat(parts, 1).view(-1, heads * width)
    pieces = [x[a:b] @ w for a, b, w in zip(ptr[:-1].tolist(), ptr[1:].tolist(), weight, strict=True)]
    return torch.cat([x.new_zeros(0, weight.shape[2]), *pieces])


def grouped_matmul(inputs, others) -> list[Tensor]:
    """Each of inputs [n_i, D_i] times its matrix of others [D_i, E_i]."""
    return [x @ w for x, w in zip(inputs, others, strict=True)]


def maxk(x: Tensor, k: int) -> Tensor:
    """x [N, D] with all but the k largest of each row 0; of equal ones those with the lowest index stay. Dense."""
    places = x.detach().sort(dim=1, descending=True, stable=True).indices[:, :k]
    return torch.zeros_like(x).scatter(1, places, x.gather(1, places))


def spmm(graph, x: Tensor | None, weight: Tensor | None, message: str, reduce: str, empty_value: float = 0.0) -> Tensor:
    """out[r] = reduce over nonzeros (r, c, e) of message(x[c], weight[e])."""
    if x is not None and weight is not None:
        weight = weight.reshape(*weight.shape, *(1,) * (x.dim() - weight.dim()))
    lhs = None if x is None or message == "copy_rhs" else x[graph.indices.long()]
    rhs = None if weight is None or message == "copy_lhs" else weight[edges_of(graph)]
    return segment_reduce(_combine(message, lhs, rhs), graph.indptr, reduce, empty_value)


def graph_conv(
    graph, x: Tensor, weight: Tensor | None, source_scale, row_scale, bias: Tensor | None, relu: bool
) -> Tensor:
    """act(row_scale * sum over nonzeros (r, c, e) of weight[e] * source_scale[c] * x[c] + bias); None: left out."""
    shape = (-1, *(1,) * (x.dim() - 1))
    if source_scale is not None:
        x = x * source_scale.view(shape)
    out = spmm(graph, x, weight, "copy_lhs" if weight is None else "mul", "sum")
    if row_scale is not None:
        out = out * row_scale.view(shape)
    if bias is not None:
        out = out + bias
    return torch.relu(out) if relu else out


def sddmm(graph, lhs: Tensor | None, rhs: Tensor | None, op: str, lhs_target: str, rhs_target: str) -> Tensor:
    """out[e] = op(lhs of its target, rhs of its target) for every nonzero (r, c, e)."""
    edges = edges_of(graph)
    where = {"u": graph.indices.long(), "v": rows_of(graph.indptr), "e": edges}
    left = None if lhs is None or op == "copy_rhs" else lhs[where[lhs_target]]
    right = None if rhs is None or op == "copy_lhs" else rhs[where[rhs_target]]
    value = _combine(op, left, right)
    return torch.zeros_like(value).index_copy(0, edges, value)


def edge_softmax(graph, scores: Tensor) -> Tensor:
    """Softmax of scores [nnz, *H] over the edges of each row."""
    edges = edges_of(graph)
    s = scores[edges]
    top = segment_reduce(s.detach(), graph.indptr, "max")
    rows = rows_of(graph.indptr)
    p = (s - top[rows]).exp()
    p = p / segment_reduce(p, graph.indptr, "sum")[rows]
    return torch.zeros_like(p).index_copy(0, edges, p)


def head_dots(x: Tensor, vectors: Tensor) -> Tensor:
    """out[v, n, h] = <x[n, h], vectors[v, h]>."""
    return torch.einsum("nhf,vhf->vnh", x, vectors)


def gatv2_scores(graph, x: Tensor, y: Tensor, vectors: Tensor, negative_slope: float) -> Tensor:
    """<vectors[h], leaky_relu(x[u, h] + y[v, h])> of every edge (u, v) and head h."""
    value = torch.nn.functional.leaky_relu(sddmm(graph, x, y, "add", "u", "v"), negative_slope)
    return (value * vectors).sum(-1)


def attention(graph, x: Tensor, score_src: Tensor, score_dst: Tensor, negative_slope: float, factor=None) -> Tensor:
    """Additive attention over x [num_cols, H, F]: the composition of sddmm and edge_attention."""
    scores = sddmm(graph, score_src, score_dst, "add", "u", "v")
    return edge_attention(graph, torch.nn.functional.leaky_relu(scores, negative_slope), x, factor)


def dot_attention(graph, query: Tensor, key: Tensor, value: Tensor, scale: float, factor=None, bias=None) -> Tensor:
    """Dot-product attention over [.., H, F]: the composition of sddmm and edge_attention."""
    scores = sddmm(graph, key, query, "dot", "u", "v").squeeze(-1) * scale
    return edge_attention(graph, scores if bias is None else scores + bias, value, factor)


def edge_attention(graph, scores: Tensor, x: Tensor, factor: Tensor | None = None) -> Tensor:
    """Sum of x [num_cols, H, F] weighted by the softmax of scores [nnz, H] times factor [nnz, H]."""
    weight = edge_softmax(graph, scores)
    if factor is not None:
        weight = weight * factor
    return spmm(graph, x, weight.unsqueeze(-1), "mul", "sum")


def gat(graph, x: Tensor, att_src: Tensor, att_dst: Tensor, negative_slope: float, factor=None) -> Tensor:
    """Additive attention over x [num_rows, H, F] with the scores <x[u], att_src> and <x[v], att_dst>."""
    return attention(graph, x, (x * att_src).sum(-1), (x * att_dst).sum(-1), negative_slope, factor)


def gatv2(graph, x: Tensor, y: Tensor, vectors: Tensor, negative_slope: float, factor=None) -> Tensor:
    """Attention over x [num_cols, H, F] with gatv2_scores."""
    return edge_attention(graph, gatv2_scores(graph, x, y, vectors, negative_slope), x, factor)


def gated_sum(graph, gate_src: Tensor, gate_dst: Tensor, x: Tensor) -> Tensor:
    """Sum of x [num_cols, F] times the sigmoid of gate_src[u] + gate_dst[v]."""
    return spmm(graph, x, sddmm(graph, gate_src, gate_dst, "add", "u", "v").sigmoid(), "mul", "sum")


def dropout_factor(seed: Tensor, dropout: float, nnz: int, heads: int) -> Tensor:
    """What dropout by counter multiplies the weights of edges with: float64 [nnz, heads], 0 or 1 / (1 - dropout).

    Weight i of nnz * heads is dropped where the upper half of output i of SplitMix64 from the seed is below
    dropout * 2^32. Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """

    def shifted(z: Tensor, by: int) -> Tensor:  # as of unsigned numbers
        return (z >> by) & ((1 << (64 - by)) - 1)

    counter = torch.arange(1, nnz * heads + 1, device=seed.device)
    z = seed.reshape(()) + counter * -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 less 2^64
    z = (z ^ shifted(z, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    z = (z ^ shifted(z, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    kept = shifted(z ^ shifted(z, 31), 32) >= int(dropout * 2**32)
    return (kept.double() / (1 - dropout)).view(nnz, heads)


def message_reduce(graph, program, operands) -> list[Tensor]:
    """The outputs of a program of messages (gnnaccel/program/program.py), one operand for each of its leaves."""
    rows = {"u": graph.indices.long(), "v": rows_of(graph.indptr), "e": edges_of(graph)}
    nnz = graph.indices.numel()
    values: list[Tensor] = []
    for step in program.steps:
        if step.op == "leaf":
            leaf, operand = program.leaves[step.numbers[0]], operands[step.numbers[0]]
            value = operand.expand(nnz, *leaf.features) if leaf.kind == "c" else operand[rows[leaf.kind]]
        elif step.op.startswith("over_"):
            value = _over(step.op[5:], values[step.args[0]], graph)[rows["v"]]
        else:
            value = message_step(step, [values[a] for a in step.args], graph)
        values.append(value.expand(nnz, *step.features))
    outs = []
    for output in program.outputs:
        value = values[output.step]
        if output.reduce == "none":
            outs.append(torch.empty_like(value).index_put((rows["e"],), value))
        else:
            outs.append(segment_reduce(value, graph.indptr, output.reduce))
    return outs


def _over(reduce: str, value: Tensor, graph) -> Tensor:
    """A reduction over the edges of each destination that edges read back."""
    if reduce != "logsumexp":
        return segment_reduce(value, graph.indptr, reduce)
    top = segment_reduce(value.detach(), graph.indptr, "max")
    return top + segment_reduce((value - top[rows_of(graph.indptr)]).exp(), graph.indptr, "sum").log()


def message_gradients(graph, program, operands: list[Tensor], wanted: tuple, grads: tuple) -> list[Tensor | None]:
    """The gradients of the `wanted` operands of a program, for one gradient or many in one of each output that has
    some; differentiable in grad mode."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        operands = [x.view_as(x) if w else x for x, w in zip(operands, wanted, strict=True)]
        outs = message_reduce(graph, program, operands)
        asked = [x for x, w in zip(operands, wanted, strict=True) if w]
        given = [(out.to(g.dtype), g) for out, g in zip(outs, grads, strict=True) if g is not None]
        ends, seeds = [out for out, _ in given], [g for _, g in given]
        found = iter(torch.autograd.grad(ends, asked, seeds, create_graph=again, allow_unused=True))
    return [next(found) if w else None for w in wanted]


def message_step(step, args: list[Tensor], graph) -> Tensor:
    """One primitive on the values of all edges."""
    op, numbers = step.op, step.numbers
    if op == "fill":
        return torch.full(step.features, numbers[0], device=graph.indptr.device)
    x = args[0]
    if op == "reshape":
        return x.reshape(x.shape[0], *step.features)
    if op == "expand":
        return _pad(x, len(step.features) + 1)
    if op == "fold":
        padded = (1,) * (x.dim() - 1 - len(step.features)) + step.features
        dims = [i + 1 for i, n in enumerate(padded) if n == 1 and x.shape[i + 1] != 1]
        return x.sum(dims, keepdim=True).reshape(x.shape[0], *step.features)
    if op == "winner":
        return (x == edges_of(graph).view(-1, *(1,) * (x.dim() - 1))).to(torch.get_default_dtype())
    if op == "keep":
        return torch.where(args[0] != 0, args[1], 0)
    if op.startswith("round_"):
        rounded = x.detach().to(getattr(torch, op[len("round_") :])).to(x.dtype)
        return rounded + (x - x.detach())  # whose derivative is not rounded
    if op == "where":
        return torch.where(args[0] != 0, args[1], args[2])
    if op in ("gt", "ge", "eq"):
        return getattr(torch, op)(*args).to(x.dtype)
    if op in ("gt_p", "ge_p", "lt_p", "le_p", "eq_p"):
        return getattr(torch, op[:-2])(x, numbers[0]).to(x.dtype)
    if op in ("max", "min"):
        return getattr(torch, op + "imum")(*args)
    of_number: dict[str, Callable] = {
        "add_p": torch.add,
        "mul_p": torch.mul,
        "div_p": torch.div,
        "max_p": torch.clamp_min,
        "min_p": torch.clamp_max,
        "rsub_p": lambda x, p: p - x,
        "rdiv_p": lambda x, p: p / x,
        "pow_p": torch.pow,
        "leaky_relu_p": torch.nn.functional.leaky_relu,
    }
    if op in of_number:
        return of_number[op](x, numbers[0])
    return getattr(torch, {"copy": "clone"}.get(op, op))(*args)
