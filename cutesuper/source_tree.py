"""Entry points of a package that is imported from a source tree and not installed.

PyTorch finds the backends of ``torch.compile`` by the entry points of installed distributions, at
the first one that it does not know. A finder of distributions, as the documentation of
`importlib.metadata` describes them ("Extending the search algorithm"), states the package's own, so
that the name is known after ``import cutesuper``, which imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path

from cutesuper.runtime.toolchain import package_version
from cutesuper.version import __version__

NAME = "cutesuper"
_FILES = {
    "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {__version__}\n",
    "entry_points.txt": f"[torch_dynamo_backends]\n{NAME} = {NAME}.torch.compile.backend:{NAME}\n",
}
_ALL = DistributionFinder.Context()


class SourceTree(Distribution):
    """The metadata that an installed distribution of this package would have."""

    def read_text(self, filename: str) -> str | None:
        """The contents of a file of its metadata, or None."""
        return _FILES.get(filename)

    def locate_file(self, path: object) -> Path:
        """The path of a file of the package."""
        return Path(__file__).resolve().parent.parent / str(path)


class Finder(DistributionFinder):
    """Finds this distribution, and no modules."""

    def find_spec(self, *_: object) -> None:
        """Nothing: modules are found as before."""

    def find_distributions(
        self, context: DistributionFinder.Context = _ALL
    ) -> Iterable[Distribution]:
        """The distribution, if all or this one are asked for."""
        return [SourceTree()] if context.name in (None, NAME) else []


def announce() -> None:
    """State the entry points, unless the package is installed."""
    if package_version(NAME) is None:
        sys.meta_path.append(Finder())
