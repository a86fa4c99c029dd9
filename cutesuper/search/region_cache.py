"""What regions were found to need, from one search to the next."""

from __future__ import annotations

import pickle
from functools import lru_cache

from cutesuper.egraph.labelled import Region
from cutesuper.ir.definitions import definitions
from cutesuper.search.region import Found, SearchOptions, search_region
from cutesuper.targets import Target

#: regions that are remembered, 24 KB each as bytes (240 KB as objects)
KEPT_REGIONS = 2048


class KnownRegions:
    """Regions that were searched before, without a limit on time; the oldest go first.

    Graphs that a model consists of have most regions in common: of the 828 of a GPT's last layer,
    which the head follows, 568 were those of the layer before (cut anywhere); and all those of a
    half are regions of the whole. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._search = lru_cache(KEPT_REGIONS)(_as_bytes)

    def search(self, region: Region, target: Target, options: SearchOptions) -> Found:
        """As `search_region`."""
        outside = tuple(definitions(op.kind for op in region.ops).items())
        found = self._search(region, target, options, outside)
        return pickle.loads(found)  # noqa: S301 (bytes of our own)


def _as_bytes(
    region: Region, target: Target, options: SearchOptions, outside: tuple[tuple[str, str], ...]
) -> bytes:
    del outside  # only tells apart what operators of one name were
    return pickle.dumps(search_region(region, target, options))
