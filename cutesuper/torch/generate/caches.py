"""Keys and values of a model that decodes: static caches of transformers, and rings for windows.

A window layer of transformers shifts all of its keys for each new one, through a copy from the
host, and counts positions in Python, so that its step can be neither captured nor replayed. The
prompt runs with it; the steps run with a ring of the same size.

This module imports transformers, and is imported only for models that come from it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from cutesuper.errors import GenerationError

#: attention whose masks are tensors that can be made on the device
ATTENTION = ("cutesuper", "eager", "sdpa")


class Ring(StaticLayer):
    """The last S positions of each sequence: position p is in column ``p % S``."""

    is_sliding = True
    keys: Any
    values: Any

    def fill(self, layer: Any, written: int) -> None:
        """Take over the keys and values of a prompt of ``written`` positions from a window layer.
        The layer has the last ones in order if it holds fewer."""
        shift = written if written > self.max_cache_len else 0
        keys, values = (t.roll(shift, 2) for t in (layer.keys, layer.values))
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.keys.copy_(keys)
        self.values.copy_(values)
        self.cumulative_length.fill_(written)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Put one position ``[B, H, 1, D]`` in the place of the oldest; all keys and values."""
        del args, options
        column = (self.cumulative_length % self.max_cache_len).view(1)
        self.keys.index_copy_(2, column, key_states)
        self.values.index_copy_(2, column, value_states)
        self.cumulative_length.add_(1)
        return self.keys, self.values


class Caches:
    """The cache of a model, for one batch of prompts after the other, always in the same memory.

    Args:
        config: of the model.
        length: positions of a sequence, prompt included.

    Raises:
        GenerationError: the model has layers, or attention, whose step cannot be replayed.
    """

    def __init__(self, config: Any, length: int) -> None:
        self._config = config
        self._text = config.get_text_config(decoder=True)
        self._length = length
        self._steps = self._new()
        _check(self._text, self._steps)
        self._prompt = self._steps
        self._rings: list[Ring] = []
        for n, layer in enumerate(self._steps.layers):
            if isinstance(layer, StaticSlidingWindowLayer):
                self._steps.layers[n] = ring = Ring(layer.max_cache_len)
                self._rings.append(ring)

    def _new(self) -> StaticCache:
        return StaticCache(self._config, max_cache_len=self._length)

    def for_prompt(self) -> StaticCache:
        """An empty cache for a prompt."""
        self._prompt = self._new()
        for n, layer in enumerate(self._steps.layers):
            if not isinstance(layer, Ring):
                layer.reset()
                self._prompt.layers[n] = layer
        return self._prompt

    def for_steps(self, written: int) -> StaticCache:
        """The cache for one position after the other, behind a prompt of ``written`` positions."""
        for layer, begun in zip(self._steps.layers, self._prompt.layers, strict=True):
            if isinstance(layer, Ring):
                layer.fill(begun, written)
        return self._steps

    def masks(self, place: Tensor, padding: Tensor | None, like: Tensor) -> Any:
        """The attention mask of one position of each sequence, as the model takes it.

        Args:
            place: int64 [], the position, padding included.
            padding: bool ``[B, length]``, false where a sequence has not begun; None: nowhere.
            like: ``[B, ...]``, of the model's element type and device.
        """
        if not self._rings:
            return padding  # the model makes the same masks of it, from lengths on the device
        lengths = {"full_attention": self._length,
                   "sliding_attention": self._rings[0].max_cache_len}  # fmt: skip
        kinds: set[str] = set(getattr(self._text, "layer_types", None) or ())
        made = {k: self._mask(n, place, padding, like) for k, n in lengths.items()
                if k in kinds or (not kinds and k == "sliding_attention")}  # fmt: skip
        return made if kinds else made["sliding_attention"]

    def _mask(self, keys: int, place: Tensor, padding: Tensor | None, like: Tensor) -> Any:
        """The mask of layers with this many columns.
        Each holds the latest position that belongs there."""

        def begun(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
            latest = place - (place - k) % keys  # below 0: nothing yet, behind the query
            return causal_mask_function(b, h, q, k) & padding[b, latest.clamp_min(0)]  # type: ignore[index]

        return ALL_MASK_ATTENTION_FUNCTIONS[self._text._attn_implementation](
            batch_size=like.shape[0],
            q_length=1,
            kv_length=keys,
            q_offset=place.clamp(max=keys - 1),  # in a full ring all columns are visible
            mask_function=causal_mask_function if padding is None else begun,
            allow_is_causal_skip=False,
            dtype=like.dtype,
            config=self._text,
            device=like.device,
        )


def _check(config: Any, cache: StaticCache) -> None:
    kinds = {type(layer) for layer in cache.layers} - {StaticLayer, StaticSlidingWindowLayer}
    types: set[str] = set(getattr(config, "layer_types", None) or ())
    if kinds or "chunked_attention" in types or getattr(config, "attention_chunk_size", None):
        found = ", ".join(sorted(k.__name__ for k in kinds)) or "attention in chunks"
        raise GenerationError(
            f"generate({type(config).__name__}): the model has layers with {found}; only caches of "
            "full attention and of sliding windows are supported; use model.generate"
        )
    if config._attn_implementation not in ATTENTION:
        raise GenerationError(
            f"generate({type(config).__name__}): its attention is {config._attn_implementation}, "
            f"whose masks depend on lengths on the host; call "
            "model.set_attn_implementation('sdpa') before"
        )
