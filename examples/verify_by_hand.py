"""The verifier on its own: a right and a wrong muGraph for the same definition.

Run it with ``python examples/verify_by_hand.py``.
"""

from __future__ import annotations

from dataclasses import replace

import cutesuper as cs


def main() -> None:
    """Take the program that was found, drop the addition of eps from it, and verify both."""
    g = cs.new_kernel_graph()
    x = g.new_input(dims=(8, 256), dtype=cs.float16)
    w = g.new_input(dims=(256, 128), dtype=cs.float16)
    g.mark_output(g.matmul(g.rms_norm(x), w))
    found = g.superoptimize().mugraph
    print("found:  ", cs.verify(g, found).summary())

    step = found.steps[0]
    ops = list(step.program.ops)
    place = next(i for i, op in enumerate(ops) if op.kind == "add")
    kept = next(j for j in ops[place].inputs if ops[j].kind != "constant")
    # every user of the sum takes its operand instead: eps is gone
    ops = [replace(op, inputs=tuple(kept if j == place else j for j in op.inputs)) for op in ops]
    program = replace(step.program, ops=tuple(ops))
    wrong = replace(found, steps=(replace(step, program=program),))
    print("no eps: ", cs.verify(g, wrong).summary())


if __name__ == "__main__":
    main()
