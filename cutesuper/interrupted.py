"""Ctrl-C while the command line is still being imported: a line and exit code 130, no traceback."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

_ARGUMENTS = getattr(sys, "argv", [""])


def is_command(first: str, given: list[str]) -> bool:
    """True if this process is the command line.

    Args:
        first: ``sys.argv[0]``, which is ``-m`` as long as ``python -m`` looks for its module.
        given: ``sys.orig_argv``.
    """
    name = __name__.partition(".")[0]
    return Path(first).name == name or (first == "-m" and given[given.index("-m") + 1] == name)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("cutesuper: interrupted", file=sys.stderr)
        raise SystemExit(130)
    sys.__excepthook__(kind, error, trace)


# importing this module is what does it: it is the first of the package, the others take a second
if is_command(_ARGUMENTS[0], sys.orig_argv):
    sys.excepthook = _hook
