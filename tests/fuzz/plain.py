"""Random modules that gather and scatter with torch alone: arithmetic of rows of nodes and of edges, writes in place,
no_grad blocks, branches on values, kept rows; accelerated against the same module without gnnaccel.

`case(seed)` writes the source of one forward(), runs it five times both ways, on edges that stay and features that do
not, and compares results, gradients and what it kept. From its fourth call on a call may be made again without code.
"""

from __future__ import annotations

import copy
import linecache
import random

import torch
import torch.nn.functional as F

from gnnaccel import plain
from gnnaccel.lower import bounds

bounds.FEW_MESSAGES, bounds.FEW_AT_FIRST = {}, {}
NODES, EDGES, D = 9, 40, 4

UNARY = ("{}.tanh()", "F.relu({})", "{} * 0.5", "1.5 - {}", "F.leaky_relu({}, 0.2)", "self.lin({})", "{}.sigmoid()",
         "{}.detach() + {}", "{}.clone()", "{}.view(-1, 2, 2).flatten(1)", "{} / (2 + {}.abs().sum(-1, keepdim=True))",
         "torch.cat([{}[:, :2], {}[:, 2:]], -1)", "self.mlp({})", "{}.softmax(-1)")  # fmt: skip
VALUES = [text for text in UNARY if "view" not in text]  # a view, made without gradients, of what has one says it has
BINARY = (
    "{} + {}",
    "{} - {}",
    "{} * {}",
    "{} / (2 + {}.abs())",
    "torch.maximum({}, {})",
    "self.pair(torch.cat([{}, {}], -1))",
)
GATHERS = (
    "{}[of]",
    "{}[to]",
    "{}.index_select(0, of)",
    "torch.index_select({}, 0, to)",
    "{}[edges[0]]",
    "{}[pairs[:, 1]]",
)
SCATTERS = (
    "torch.zeros_like({h}).index_add_(0, {i}, {m})",
    "{h}.new_zeros(NODES, D).scatter_add_(0, {i}[:, None].expand_as({m}), {m})",
    "torch.index_add({h}, 0, {i}, {m})",
    "{h}.index_add(0, {i}, {m})",
    "torch.zeros_like({h}).scatter_reduce_(0, {i}.view(-1, 1).expand_as({m}), {m}, 'mean', include_self=False)",
    "torch.full_like({h}, 7).scatter_reduce(0, {i}.unsqueeze(1).expand({m}.shape), {m} + self.apart, 'amax',"
    " include_self=False)",
    "scatter({m}, {i}, NODES)",
)
IN_PLACE = ("{}.mul_(0.5)", "{}.add_(1)", "{}[:2] = 0", "F.elu({}, inplace=True)", "{} += 1")


def scatter(messages, index, nodes):
    out = torch.zeros(nodes, messages.shape[1], dtype=messages.dtype)
    return out.index_add_(0, index, messages)


def source(made: random.Random) -> str:
    """forward(self, x, edges, e) of some random statements."""
    ends = made.choice(("of, to = edges", "to, of = edges", "of, to = edges[0], edges[1]", "of, to = e_of, e_to"))
    lines = ["pairs = edges.t()", "e_of, e_to = self.ends", ends]
    nodes, edges = ["x"], ["e"]

    def new(kind: list[str], prefix: str, text: str) -> None:
        name = f"{prefix}{len(lines)}"
        lines.append(f"{name} = {text}")
        kind.append(name)

    def filled(template: str, names: list[str]) -> str:
        first = made.choice(names)
        count = template.count("{}")
        if template in BINARY:
            return template.format(first, made.choice(names), *[first] * (count - 2))
        return template.format(*[first] * count)

    for _ in range(made.randint(4, 14)):
        match made.choice("ggguubbssswno"):
            case "g":
                new(edges, "m", filled(made.choice(GATHERS), nodes))
            case "u":
                kind, prefix = made.choice(((nodes, "h"), (edges, "m")))
                new(kind, prefix, filled(made.choice(UNARY), kind))
            case "b":
                kind, prefix = made.choice(((nodes, "h"), (edges, "m"), (edges, "m")))
                new(kind, prefix, filled(made.choice(BINARY), kind))
            case "s":
                text = made.choice(SCATTERS)
                new(
                    nodes,
                    "h",
                    text.format(
                        h=made.choice(nodes), m=made.choice(edges[-3:]), i=made.choice(("to", "to", "to", "of"))
                    ),
                )
            case "w" if made.random() < 0.3:
                name = made.choice([n for n in (*nodes, *edges) if n not in "xe"] or ["x.clone()"])
                if "." not in name:
                    lines.append(made.choice(IN_PLACE).format(name))
            case "n":
                lines.append("with torch.no_grad():")
                new(edges, "    m", filled(made.choice(VALUES), edges))
                edges[-1] = edges[-1].strip()
            case "o" if made.random() < 0.5:
                name = made.choice(edges)
                lines.append(
                    made.choice((f"self.kept = {name}", f"{name} = {name} * (2 if ({name} > 0).any() else 3)"))
                )
    total = " + ".join(nodes)
    lines.append(f"return {total}, {made.choice(edges)}")
    return "def forward(self, x, edges, e):\n" + "".join(f"    {line}\n" for line in lines)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(D, D)

    def forward(self, x):
        return torch.tanh(self.first(x)) * 0.5


def module(text: str, seed: int) -> torch.nn.Module:
    """A module with this forward()."""
    name = f"<plain {seed}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space: dict = {"torch": torch, "F": F, "scatter": scatter, "NODES": NODES, "D": D, "__name__": __name__}
    exec(compile(text, name, "exec"), space)
    kind = type("Random", (torch.nn.Module,), {"forward": space["forward"], "__module__": __name__})
    made = kind()
    made.lin, made.pair, made.mlp, made.kept, made.ends = (
        torch.nn.Linear(D, D),
        torch.nn.Linear(2 * D, D),
        Mlp(),
        None,
        (),
    )
    made.register_buffer(
        "apart", torch.linspace(0, 0.01, EDGES)[:, None]
    )  # the gradient of equal maxima goes to one of them
    return made.double()


def results(layer: torch.nn.Module, given: list) -> list:
    """Of one call: results, gradients, what it kept."""
    x, edges, e = (t.detach().requires_grad_() if t.is_floating_point() else t for t in given)
    outs = layer(x, edges, e)
    loss = sum((out * torch.linspace(-1, 1, out.numel()).double().view_as(out)).sum() for out in outs)
    found = list(outs)
    if loss.requires_grad:
        found += torch.autograd.grad(loss, [x, e, *layer.parameters()], allow_unused=True)
    return [*found, layer.kept]


def case(seed: int) -> None:
    made = random.Random(seed)
    text = source(made)
    torch.manual_seed(seed)
    alone = module(text, seed)
    ours = copy.deepcopy(alone)
    plain.accelerate(ours)
    edges = torch.randint(NODES, (2, EDGES))
    given = [torch.randn(NODES, D).double(), edges, torch.randn(EDGES, D).double()]
    alone.ends = ours.ends = (edges[0].clone(), edges[1].clone())
    for call in range(5):
        given[0] = torch.randn(NODES, D).double()
        if call == 4 and made.random() < 0.2:
            edges[:, 0] = edges[:, 1]
        try:
            want = results(alone, given)
        except RuntimeError:  # a write that autograd minds
            return
        mine = results(ours, given)
        for number, (a, b) in enumerate(zip(mine, want, strict=True)):
            where = f"call {call}, result {number} of\n{text}"
            assert (a is None) == (b is None) or not (b if a is None else a).any(), where
            if a is not None and b is not None:
                assert type(a) is torch.Tensor and (a.grad_fn is None) == (b.grad_fn is None), f"{type(a)}, {where}"
                torch.testing.assert_close(
                    a, b, rtol=1e-9, atol=1e-9, msg=lambda words, where=where: f"{words}\n{where}"
                )
