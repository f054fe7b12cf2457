"""A graph in parts, one per rank of torch.distributed: cut, on disk, loaded, rows exchanged. Knows no framework.

Users' way in is `gnnaccel.distributed`.
"""

from gnnaccel.parts.part import Part, load

__all__ = ["Part", "load"]
