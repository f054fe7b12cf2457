"""Plain training programs that `gnnaccel compare` runs as they are, with and without gnnaccel.

Nothing in this folder knows gnnaccel, unless MaxK or a captured step is asked for: the files are started by path, and
use torch and a framework's public API.
"""
