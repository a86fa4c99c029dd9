"""Tuning: the best few muGraphs with several schedules each, timed on the GPU; the winner is kept.

`candidates` makes programs x schedules and compiles them, `isolate` holds a process that may hang
or die, `process` is the work of that process and `device` its interface to a GPU, `tuner` has the
budget, the rounds and the decision, `report` the table. The winner goes to `cutesuper.store`.
"""
