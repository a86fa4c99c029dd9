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


@dataclass(frozen=True)
class KeptCode:
    """A graph of Dynamo whose compiled form may be kept.

    Attributes:
        key: decides, with the graph and the GPU, which regions get kernels; None if that is not
            known, so nothing is kept: verdicts under a budget depend on how busy the processor was,
            operators that were added to the table may be others in the next process, and without a
            folder that can be written there are no kernels on disk.
        question: of its name on record.
    """

    key: str | None
    question: Sequence[object]

    def follow(self, report: GraphReport) -> None:
        """Let no later process find what is compiled now if it may decide otherwise.
        The next one keeps nothing, or each would leave its code on disk; the one after it may."""
        if report.passing:
            records.write(self.question, {"name": None})


def kept_code(gm: fx.GraphModule, options: BackendOptions) -> KeptCode:
    """The key of a graph of Dynamo."""
    question = "code", hashlib.sha256(gm.code.encode()).hexdigest()
    if options.budget_s is not None or added(TABLE):
        return KeptCode(None, question)
    names = _name(_FOLDER), _name(question)
    decided = options.take, options.target, str(sorted(options.inductor.items()))
    known = (*question, *names, *decided, store.state())
    return KeptCode(None if None in names else records.digest(known), question)


def _name(question: Sequence[object]) -> str | None:
    """The name on record, made if there is none; None if none can be kept."""
    record = records.read(question)
    if record is None or record.get("name") is None:
        records.write(question, {"name": uuid.uuid4().hex})
    return (record or records.read(question) or {}).get("name")
