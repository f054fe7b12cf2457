"""Messages that a user's own code writes, seen without being made.

The code gets a `tensor.Lazy` in place of one row per edge of a feature; what it does to it becomes an expression, and
a reduction of an expression one or two of our ops. Knows no framework: the backends hand out lazy features.

    tensor         the lazy feature
    rules          what functions of torch make of it, one rule each
    linear_rules   concatenations, towers and linear maps
    expression     what a message is, edge by edge
    reduce         messages, lazy or not, reduced over the edges of each destination
    programs       expressions as programs of one kernel (CPU)
    blocks         other expressions, and all on CUDA, in blocks of edges
    trust          whether code may be handed lazy features
"""

from gnnaccel.lazy import linear_rules  # noqa: F401 (with rules.py, fills tensor.RULES)
