"""The beginning of a kernel: programmatic dependent launch, and registers handed over.
A dependent launch waits for the kernel before it; registers move between warpgroups."""

from __future__ import annotations

import cutlass.cute as cute


def wait_for_predecessor() -> None:
    """Wait until the kernel before has ended, and its results are in memory."""
    cute.arch.griddepcontrol_wait()


def start_successor() -> None:
    """Let the next kernel start; it waits itself for the results of this one."""
    cute.arch.griddepcontrol_launch_dependents()


def take_registers(count: int) -> None:
    """Raise the registers of each thread of a warpgroup to ``count``; waits until they are free."""
    cute.arch.setmaxregister_increase(count)


def give_registers(count: int) -> None:
    """Lower the registers of each thread of a warpgroup to ``count``."""
    cute.arch.setmaxregister_decrease(count)
