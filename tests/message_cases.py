"""What the tests of programs of messages share: graphs, operands, messages, and the comparison with their definition in
plain torch, in float64: values, gradients, gradients of those."""

import torch

from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import messages as m
from gnnaccel.ops import reference
from gnnaccel.program.program import program_of

q, k, x, w = m.u("q"), m.v("k"), m.u("x"), m.e("w")
REDUCES = ("sum", "mean", "max", "min", "none")


def graph_of(rows, cols, edges, seed=0, dtype=torch.int64, device="cpu"):
    """A graph with a hub, empty rows and repeated edges."""
    made = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, rows, (edges,), generator=made)
    ends[: edges // 3] = rows // 2
    ends[ends == 0] = rows - 1
    sources = torch.randint(0, cols, (edges,), generator=made)
    return Graph.from_coo(ends.to(device, dtype), sources.to(device, dtype), num_rows=rows, num_cols=cols)


def operands_of(graph, message, features, seed=0, dtype=torch.float64, scale=1.0):
    """One for each leaf; of "name:1" and "name:h" with one number, and with one for each head."""
    made = torch.Generator().manual_seed(seed)
    rows = {"u": (graph.num_cols,), "v": (graph.num_rows,), "e": (graph.nnz,), "c": ()}
    out = {}
    for kind, name in message.leaves:
        shape = {"1": (1,) * len(features), "h": (*features[:-1], 1)}.get(name.partition(":")[2], features)
        value = torch.randn(*rows[kind], *shape, generator=made, dtype=torch.float64) * scale
        out[name] = value.to(graph.device, dtype).requires_grad_()
    return out


def defined(graph, message, operands, reduce):
    """The definition, with operands as they are."""
    names = message.leaves
    shapes = tuple(((kind, name), tuple(operands[name].shape[kind != "c" :])) for kind, name in names)
    program, leaves = program_of(((message, reduce),), shapes)
    return reference.message_reduce(graph, program, [operands[name] for _, name in leaves])[0]


def magnitudes(graph, message, operands, seed):
    """For each number of a sum of messages, and of its gradients: the sum of its summands' absolute values."""
    rows = {"u": graph.indices.long(), "v": reference.rows_of(graph.indptr), "e": reference.edges_of(graph)}
    each = torch.arange(graph.nnz, device=graph.device)
    kinds = {name: kind for kind, name in message.leaves}
    lifted = {name: value.detach()[rows[kinds[name]]].requires_grad_() for name, value in operands.items()}
    alone = defined(Graph.from_coo(each, each), message, lifted, "sum")  # each edge is a row by itself
    grads = torch.autograd.grad(alone, list(lifted.values()), seed[rows["v"]])
    found = [torch.zeros_like(seed).index_add_(0, rows["v"], alone.detach().abs())]
    for (name, value), grad in zip(operands.items(), grads, strict=True):
        found.append(torch.zeros_like(value.detach()).index_add_(0, rows[kinds[name]], grad.abs()))
    return found


def compare_sums(graph, message, operands, bound):
    """`compare` of sums in a narrow dtype, whose errors go with what is summed: a sum itself may cancel out."""
    wide = {name: value.detach().double().requires_grad_() for name, value in operands.items()}
    got, want = ops.message_reduce(graph, message, operands), defined(graph, message, wide, "sum")
    seed = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seed = seed.to(graph.device, got.dtype)
    pairs = [
        (got, want),
        *zip(
            torch.autograd.grad(got, list(operands.values()), seed),
            torch.autograd.grad(want, list(wide.values()), seed.double()),
            strict=True,
        ),
    ]
    for (one, other), scale in zip(pairs, magnitudes(graph, message, wide, seed.double()), strict=True):
        worst = ((one.double() - other).abs() / (scale + 1)).max()
        assert worst <= bound, f"an error of {float(worst):.2g} times the summands"


def compare(graph, message, operands, reduce, second=False, **tolerance):
    leaves = list(operands.values())
    wide = {name: value.detach().double().requires_grad_() for name, value in operands.items()}
    got, want = ops.message_reduce(graph, message, operands, reduce), defined(graph, message, wide, reduce)
    torch.testing.assert_close(got.double(), want, **tolerance)
    seed = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seed = seed.to(graph.device, got.dtype)  # both sides are given the rounded one
    options = {"create_graph": second, "allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(got, leaves, seed, **options)
    wanted = torch.autograd.grad(want, list(wide.values()), seed.double(), **options)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, **tolerance)
    if second and any(t.requires_grad for t in wanted):
        ends = [torch.autograd.grad(sum((t.double() ** 2).sum() for t in found if t.requires_grad), list(inputs),
                                    allow_unused=True, materialize_grads=True)
                for found, inputs in ((grads, leaves), (wanted, wide.values()))]  # fmt: skip
        for one, other in zip(*ends, strict=True):
            torch.testing.assert_close(one.double(), other, **tolerance)


USUAL = {
    "gated": m.sigmoid(q + k) * x,
    "edges": m.relu(x + w) + 1e-7,
    "film": m.relu(m.u("g") * x + k) * m.c("scale"),
    "heads": m.u("a:h") * x * m.e("w:h"),
    "dot": m.dot(q, k, keepdim=True) * x,
    "norm": m.sqrt(m.sum(m.square(q - k), -1, True) + 1.0) * x,
    "one number": x * m.e("w:1") + m.v("b:1"),
    "destination alone": m.tanh(k),
    "sums of features": m.sum(q + k, -1, True),  # whose gradient is the same for each of them
    "copied": x,
}

# Softmaxes over the edges of a destination.
SOFTMAXES = {
    "attention with edges": (x + w) * m.softmax(m.dot(k, q + w, keepdim=True) * 0.5),
    "scores of both ends": x * m.softmax(m.leaky_relu(m.u("a:h") + m.v("b:h") + m.e("w:h"), 0.2)),
    "each feature": m.softmax(m.tanh(q + k)) * x,
    "some weights kept": x * (m.softmax(m.u("a:h") * 3.0) * m.e("kept:h")),
    "a factor of all": m.softmax(q * m.c("scale")) * (x - k),
    "two": m.softmax(q) * x + m.softmax(q * 2.0) * w,
    "the weights": m.softmax(m.u("a:h") + m.v("b:h")),
    "one in another": m.softmax(q * m.softmax(k + q)) * x,
    "of the destination alone": m.softmax(m.v("b:h")) * x,
    "beside what both ends give": m.softmax(m.u("a:h")) * x + k * w,
    "of sources and edges": m.softmax(m.relu(x + w)) * m.relu(x + w),
    "its square": m.square(m.softmax(q + k)) * x,
}


def options_of(function):
    given = {
        "pow": [(2.0,), (3.0,), (0.5,), (-0.5,), (-1.0,), (1.0,), (1.7,)],
        "round": [("bfloat16",), ("float32",)],
        "hardtanh": [(), (-0.3, 0.4)],
        "clamp": [(-0.5, 0.5), (None, 0.2), (-0.1, None)],
        "leaky_relu": [(), (0.2,)],
        "gelu": [(), ("tanh",)],
        "elu": [(), (0.7,)],
        "softplus": [(), (2.0, 1.0)],
        "sum": [((-1,), True), ((-2,), True), ((-1, -2), True), ((-1,), False)],
        "reshape": [((8, 2),), ((16,),)],
    }
    return given.get(function, [()])


TWO = ("add", "sub", "mul", "div", "maximum", "minimum", "gt", "ge", "lt", "le", "eq", "ne")


def messages_of(function):
    """Messages of one function, with each of its options."""
    positive = function in ("log", "sqrt", "rsqrt", "reciprocal", "pow", "div", "log1p")
    inner = m.square(q + k) + 0.3 if positive else q + k
    found = []
    for options in options_of(function):
        if function == "where":
            found += [m.where(q > k, x, 2.0), m.where(q >= 0.1, 0.5, x), m.where(q < k, x, k), m.where(q < 0.2, x, k)]
        elif function in TWO:
            made = [(inner, m.square(x) + 0.2), (inner, 0.7), (0.7, inner)]
            messages = [m.Expression(function, args) for args in made]
            if function in ("gt", "ge", "lt", "le", "eq", "ne"):  # which have no gradient of their own
                messages = [message * q for message in messages]
            found += messages
        else:
            found.append(m.Expression(function, (inner,), options))
    return found


def random_message(made, depth):
    leaves = [q, k, x, w, m.c("scale"), m.u("a:h"), m.e("w:1")]
    if depth == 0:
        return made.choice(leaves)
    one, other = random_message(made, depth - 1), random_message(made, made.randrange(depth))
    kind = made.randrange(9)
    if kind < 4:
        return (one + other, one - other, one * other, other * made.choice((-0.5, 2.0)))[kind]
    return (m.sigmoid(one), m.tanh(one), m.leaky_relu(one, 0.3), m.maximum(one, other), m.exp(-m.square(one)))[kind - 4]
