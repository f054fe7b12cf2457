"""Fuzzers: programs that try random cases for as long as they are given, each repeatable by its number.

    make fuzz MINUTES=10
    python tests/fuzz/run.py --only ops --case 7

A target is a module with ``case(seed)``, which does one thing that depends on the seed alone, and raises (an
AssertionError that describes the case, or whatever a bug raises) if it went wrong. `TARGETS` lists them. Those of
`CALLS` are counted (reached.py): their cases return what is expected of their calls.
"""

# target -> how many cases tests/test_fuzz.py runs of it; together they take about 80 seconds on one core
TARGETS = {
    "arrays": 1000,
    "ops": 1800,
    "layers": 800,
    "messages": 700,
    "dgl_calls": 1200,
    "plain": 1000,
}
CALLS = ("layers", "messages", "dgl_calls")  # the others call ops themselves
