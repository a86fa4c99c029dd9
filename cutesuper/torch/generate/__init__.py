"""`cutesuper.generate`: tokens from models of the transformers library, a CUDA graph for each step.

It imports torch at once, and transformers when it is given a model.
"""

from __future__ import annotations

from cutesuper.torch.generate.decoder import Decoder, generate

__all__ = ["Decoder", "generate"]
