"""The state of a decoding loop: what a step reads and writes on the device, and the end of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutesuper.errors import OptionError
from cutesuper.ir.arguments import shown


@dataclass(frozen=True)
class Ends:
    """The end of sequences.

    Attributes:
        ids: tokens that end a sequence.
        pad: the token that stands behind an end.
    """

    ids: tuple[int, ...]
    pad: int

    @staticmethod
    def of(config: Any, eos: int | Sequence[int] | None, pad: int | None) -> Ends:
        """Tokens of a call; those of a configuration in the place of None.

        Raises:
            OptionError: something else than tokens.
        """
        eos = config.eos_token_id if eos is None else eos
        pad = config.pad_token_id if pad is None else pad
        ids = () if eos is None else tuple(eos) if isinstance(eos, Sequence) else (eos,)
        pad = pad if pad is not None else ids[0] if ids else 0
        if not all(isinstance(i, int) and i >= 0 for i in (*ids, pad)):
            raise OptionError(
                f"generate(eos_token_id={shown(eos)}, pad_token_id={shown(pad)}): must be tokens, "
                "ints of at least 0; eos_token_id may be several"
            )
        return Ends(ids, pad)

    def cut(self, tokens: Tensor, going: Tensor) -> int:
        """The number of columns of new tokens ``[B, n]`` up to the end of the last sequence.

        Args:
            tokens: on the host.
            going: bool ``[B]``, sequences that have not ended before; those that end here leave.
        """
        ended = torch.isin(tokens, torch.tensor(self.ids, dtype=tokens.dtype)).cumsum(-1) > 0
        running = (~ended & going[:, None]).any(0)
        going &= ~ended[:, -1]
        return min(int(running.sum()) + 1, tokens.shape[1])


@dataclass(frozen=True)
class State:
    """The tensors that a step reads and writes, always in the same memory.

    Attributes:
        token: int64 ``[B, 1]``, the latest of each sequence.
        position: int64 ``[B, 1]``, its position, padding not counted.
        place: int64 [], its position in the cache.
        step: int64 [1], the column of ``made`` for the next token.
        made: int64 ``[B, length]``, the new tokens.
        ended: bool ``[B]``.
        shown: bool ``[B, length]``, false where a sequence has not begun.
    """

    token: Tensor
    position: Tensor
    place: Tensor
    step: Tensor
    made: Tensor
    ended: Tensor
    shown: Tensor

    @staticmethod
    def new(batch: int, length: int, device: torch.device) -> State:
        """The state of a decoder."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return State(
            zeros(batch, 1), zeros(batch, 1), zeros(), zeros(1), zeros(batch, length),
            zeros(batch, dtype=torch.bool), zeros(batch, length, dtype=torch.bool),
        )  # fmt: skip

    def begin(self, shown: Tensor) -> None:
        """Begin behind a prompt; ``shown``: bool ``[B, L]``, false at padding."""
        self.place.fill_(shown.shape[1])
        self.position.copy_(shown.sum(1, keepdim=True))
        self.step.zero_()
        self.ended.zero_()
        self.shown.fill_(True)
        self.shown[:, : shown.shape[1]] = shown

    def take(self, tokens: Tensor, ends: Ends) -> None:
        """Append the chosen tokens ``[B]``."""
        if ends.ids:
            tokens = tokens.masked_fill(self.ended, ends.pad)
            for end in ends.ids:
                self.ended.logical_or_(tokens == end)
        self.made.index_copy_(1, self.step, tokens[:, None])
        self.token.copy_(tokens[:, None])
        self.step.add_(1)

    def advance(self) -> None:
        """Count the position of a token that has been read."""
        self.position.add_(1)
        self.place.add_(1)
