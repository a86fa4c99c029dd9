"""Text that the examples make themselves: a language in which words have a few usual successors.

Words are numbers. Each is followed by one of `SUCCESSORS` words, with probabilities `CHOICE`; which
words those are is drawn once, frequent ones more often. So a model starts at a loss of
ln(vocabulary) and, once it knows the words, reaches the entropy of `CHOICE`, 1.21 nats.
"""

from __future__ import annotations

import torch

SUCCESSORS = 4
CHOICE = (0.5, 0.25, 0.15, 0.1)


def make_text(
    vocabulary: int, sequences: int, length: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the successor of each, both int64 [sequences, length], on the CPU.

    The same arguments give the same text, on every machine.
    """
    draw = torch.Generator().manual_seed(seed)
    # Zipf's law: word w is drawn in proportion to 1 / (w + 1)
    frequency = 1.0 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    words = torch.multinomial(frequency, vocabulary * SUCCESSORS, replacement=True, generator=draw)
    successors = words.view(vocabulary, SUCCESSORS)
    choices = torch.multinomial(
        torch.tensor(CHOICE, dtype=torch.float64), sequences * length, True, generator=draw
    ).view(sequences, length)
    text = torch.empty(sequences, length + 1, dtype=torch.int64)
    text[:, 0] = torch.multinomial(frequency, sequences, replacement=True, generator=draw)
    for position in range(length):
        text[:, position + 1] = successors[text[:, position], choices[:, position]]
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
