"""Modules that gather and scatter with torch alone: ``x[edge_index[0]]``, ``index_add_``, ``scatter_reduce``.

`accelerate` lets the forward() of such a module run with lazy rows (gnnaccel.lazy) in place of those that it gathers,
and what it scatters is one walk over the edges.

    modules   which modules are accelerated, and how their forward() is called
    rows      gathers and scatters of one call
"""

from gnnaccel.plain.modules import REPLACED, accelerate, code_of, disable, enable, obstacle, rows_now, traced, wait_for

__all__ = ["REPLACED", "accelerate", "code_of", "disable", "enable", "obstacle", "rows_now", "traced", "wait_for"]
