"""``python -m benchmarks WORKLOAD``."""

from __future__ import annotations

from benchmarks import main

raise SystemExit(main())
