"""`cutesuper.patch`: run models in the style of the transformers library with cutesuper.

This package is on top of everything else, like `cutesuper.ops`. It imports torch, and transformers
only for models that come from it.
"""

from __future__ import annotations

from cutesuper.torch.patch.model import Patch, patch, register_attention
from cutesuper.torch.patch.report import Entry, Report

__all__ = ["Entry", "Patch", "Report", "patch", "register_attention"]
