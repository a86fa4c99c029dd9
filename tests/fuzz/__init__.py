"""A fuzzer: random programs, searched, verified, run, and judged by a reference of its own.

    python -m tests.fuzz --seconds 60                 random programs until the time is over
    python -m tests.fuzz --replay 7:123               the program 123 of seed 7 again
    python -m tests.fuzz --replay '{"sources": ..}'   what the minimiser has printed

`programs` says what a program is, `draw` makes one of a seed, `formulas` and `judge` say what it
should compute, `check` runs it, `minimise` makes a failing one small. `functions` does the same
with functions of PyTorch. See ``docs/howto/fuzzing.md``.
"""
