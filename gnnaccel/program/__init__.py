"""Programs: what a layer computes for each edge and row, as values that know no tensors.

language     expressions: leaves u, v, e and c, and functions of them
shapes       how feature shapes broadcast
program      an expression with shapes: primitive steps
derivatives  the programs of a program's gradients
"""
