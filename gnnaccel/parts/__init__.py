"""A graph in parts, one per rank of torch.distributed: cut, on disk, loaded, rows exchanged. Knows no framework.

Users' way in is `gnnaccel.distributed`.
"""

from gnnaccel.parts.part import Part, load
from gnnaccel.parts.ranks import join

__all__ = ["Part", "join", "load"]
