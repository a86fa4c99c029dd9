"""Cache of searched regions, kept from one search to the next."""

from __future__ import annotations

import pickle
from functools import lru_cache

from cutesuper.egraph.labelled import Region
from cutesuper.ir.definitions import definitions
from cutesuper.search.region import Found, SearchOptions, search_region
from cutesuper.targets import Target

#: most regions that are kept, 24 KB each as bytes (240 KB as objects)
KEPT_REGIONS = 2048


class KnownRegions:
    """Results for regions that were searched without a time limit; the oldest are dropped first.

    The graphs of a model share most regions: of the 828 regions of a GPT's last layer, which the
    head follows, 568 were those of the layer before (cut anywhere); and all regions of a half are
    regions of the whole. It is safe to use from several threads.
    """

    def __init__(self) -> None:
        self._search = lru_cache(KEPT_REGIONS)(_as_bytes)

    def search(self, region: Region, target: Target, options: SearchOptions) -> Found:
        """Search a region as `search_region` does, or return the known result."""
        outside = tuple(definitions(op.kind for op in region.ops).items())
        found = self._search(region, target, options, outside)
        return pickle.loads(found)  # noqa: S301 (bytes of our own)


def _as_bytes(
    region: Region, target: Target, options: SearchOptions, outside: tuple[tuple[str, str], ...]
) -> bytes:
    del outside  # only distinguishes operators that had the same name
    return pickle.dumps(search_region(region, target, options))
