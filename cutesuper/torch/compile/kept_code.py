"""Compiled graphs that PyTorch keeps on disk, with the calls of kernels in them.

The cache of AOTAutograd finds what was compiled by the graph that Dynamo captured, before a backend
sees it: a later process neither traces the backward pass nor cuts the graph into regions. So its
key must have all that decides which regions get kernels. What the calls need is in their own keys
(`region_operator`), and the kernels are on disk.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from cutesuper import store
from cutesuper.ir.definitions import added
from cutesuper.ir.operators.base import TABLE
from cutesuper.runtime import records
from cutesuper.torch.compile.options import BackendOptions
from cutesuper.torch.compile.report import GraphReport

#: of the name of the folder of kernels: another one has none of those that kept code calls
_FOLDER = ("folder",)
#: processes in a row that leave something of a graph for the next one to decide, behind which
#: nothing is kept: the code of each stays on disk
MOST_TRIES = 4


@dataclass(frozen=True)
class KeptCode:
    """A graph of Dynamo whose compiled form may be kept.

    Attributes:
        key: decides, with the graph and the GPU, which regions get kernels; None if that is not
            known, so nothing is kept: verdicts under a budget depend on how busy the processor was,
            operators that were added to the table may be others in the next process, and without a
            folder that can be written there are no kernels on disk.
        question: of its name on record.
        name: that it had when this was made.
        tries: of processes before, in a row, that left something to decide.
    """

    key: str | None
    question: Sequence[object]
    name: str | None = None
    tries: int = 0

    def follow(self, report: GraphReport) -> None:
        """Let no later process find what is compiled now if it may decide otherwise."""
        if report.passing:
            records.write(self.question, {"name": _new_name(), "tries": self.tries + 1})
        elif self.tries and _named(self.question)[0] == self.name:  # nor did the other pass
            records.write(self.question, {"name": self.name})


def kept_code(gm: fx.GraphModule, options: BackendOptions) -> KeptCode:
    """The key of a graph of Dynamo."""
    question = "code", hashlib.sha256(gm.code.encode()).hexdigest()
    if options.budget_s is not None or added(TABLE):
        return KeptCode(None, question)
    (folder, _), (name, tries) = _named(_FOLDER), _named(question)
    if None in (folder, name) or tries >= MOST_TRIES:
        return KeptCode(None, question, name, tries)
    decided = options.take, options.target, str(sorted(options.inductor.items()))
    known = (*question, folder, name, *decided, store.state())
    return KeptCode(records.digest(known), question, name, tries)


def _named(question: Sequence[object]) -> tuple[str | None, int]:
    """The name on record, made if there is none, and the tries behind it; None if none is kept."""
    record = records.read(question)
    if record is None:
        records.write(question, {"name": _new_name()})
        record = records.read(question) or {}
    name, tries = record.get("name"), record.get("tries")
    return name if isinstance(name, str) else None, tries if isinstance(tries, int) else 0


def _new_name() -> str:
    return uuid.uuid4().hex
