"""The choice of the next tokens from logits, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cutesuper.errors import OptionError
from cutesuper.ir.arguments import check_options


@dataclass(frozen=True)
class Sampling:
    """The way in which a token is chosen; names and order are those of transformers.

    Attributes:
        temperature: divides the logits before their softmax; 0: the likeliest token is taken.
        top_k: the number of likeliest tokens among which one is drawn; None: all.
        top_p: one is drawn among the fewest likeliest tokens whose probabilities, of those that
            ``top_k`` leaves, add up to at least this.

    Raises:
        OptionError: a number out of its range, or a limit where nothing is drawn.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_options(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        if self.temperature == 0.0 and (self.top_k is not None or self.top_p < 1.0):
            raise OptionError(
                f"generate(top_k={self.top_k}, top_p={self.top_p}): nothing is drawn at "
                "temperature 0, where the likeliest token is taken; pass temperature=1.0"
            )

    def choose(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """Tokens, int64 ``[B]``, from float32 logits ``[B, V]``.

        Drawn as the largest of ``p / e`` with exponentially distributed e, which takes no sums of
        probabilities and waits for nothing (Efraimidis and Spirakis 2006, with one draw).
        """
        if self.temperature == 0.0:
            return logits.argmax(-1)
        scores, tokens = self._left(logits / self.temperature)
        noise = torch.empty_like(scores).exponential_(generator=generator)
        # a zero, which the CPU draws, would make a NaN of a token that is left out
        noise.clamp_min_(torch.finfo(noise.dtype).tiny)
        place = (scores.softmax(-1) / noise).argmax(-1, keepdim=True)
        return (place if tokens is None else tokens.gather(-1, place))[:, 0]

    def _left(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores of the tokens that may be drawn, the others -inf, and these tokens in order.
        None for all in their own order."""
        if self.top_k is None and self.top_p == 1.0:
            return scores, None
        if self.top_k is None:
            scores, tokens = scores.sort(-1, descending=True)
        else:
            scores, tokens = scores.topk(min(self.top_k, scores.shape[-1]), -1)
        likelihood = scores.softmax(-1)
        before = likelihood.cumsum(-1) - likelihood
        hidden = before >= self.top_p
        hidden[:, 0] = False  # rounding must not leave nothing
        return scores.masked_fill(hidden, -torch.inf), tokens
