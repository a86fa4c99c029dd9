"""`generate` and `Decoder`: prompts in, tokens out, one recorded step after the other.

The prompt runs as the model is. Then one step (the model for one token of each sequence, the choice
of the next ones, all counting) is captured into a CUDA graph, once for a decoder, and replayed. The
host looks at tokens only every few steps. On the CPU the same steps run without a graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cutesuper.errors import (
    CutesuperError,
    DeviceError,
    DTypeError,
    GenerationError,
    ShapeError,
)
from cutesuper.ir.arguments import check_options
from cutesuper.measure import capture
from cutesuper.runtime.programs import KERNEL_DEVICES
from cutesuper.runtime.scratch import Loan
from cutesuper.torch.generate.sampling import Sampling
from cutesuper.torch.generate.state import Ends, State

#: steps that run before one is captured: they make kernels, and let a compiled model settle
WARM_STEPS = 2
#: the room of a decoder that `generate` makes is a multiple of so many positions, so that calls of
#: similar lengths share kernels and compiled steps
ROOM = 256
#: part of the largest logit, beside so many units of rounding of the model's type, by which logits
#: of a prompt may differ from those without a cache
NEAR, ROUNDINGS = 1e-3, 8


class Decoder:
    """A model that generates tokens for one batch of prompts after the other.

    The cache, and a CUDA graph of one decoding step, are made at the first call and used again by
    the others. The graph reads the parameters of the model where they are: after they were
    replaced, or the model was patched or compiled, make a new decoder.

    Args:
        model: a causal language model of transformers on one device: as it is, patched by
            `cutesuper.patch`, or compiled by ``torch.compile``.
        batch: prompts of a call.
        length: most positions of a sequence, prompt, padding and new tokens together.
        temperature: divides the logits; 0: the likeliest token is taken.
        top_k: tokens among which one is drawn, the likeliest; None: all.
        top_p: one is drawn among the likeliest tokens that have this probability together.
        eos_token_id: one or several tokens that end a sequence; None: those of the model's
            ``generation_config``; an empty sequence: none.
        pad_token_id: stands behind the end of a sequence; None: that of ``generation_config``, or
            the first that ends one.

    Raises:
        GenerationError: no such model, or one whose steps cannot be replayed; says why.
        OptionError: a value that an option cannot have.
    """

    @torch.inference_mode(False)  # inference tensors could not be written in other modes
    def __init__(
        self,
        model: Any,
        batch: int,
        length: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        self._sampling = Sampling(temperature, top_k, top_p)
        self._model, self._original = model, getattr(model, "_orig_mod", model)
        self._device = _device_of(self._original)
        self._ends = Ends.of(model.generation_config, eos_token_id, pad_token_id)
        from cutesuper.torch.generate.caches import Caches  # imports transformers

        self._caches = Caches(model.config, length)
        self._state = State.new(batch, length, self._device)
        self._generator = torch.Generator(self._device)
        parameters = inspect.signature(self._original.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        #: true if the library says that the model knows caches of fixed length, or that was seen
        self._is_sure = getattr(self._original, "_can_compile_fullgraph", False)
        self._loan = Loan()
        #: steps that have run, and the graph, with and without padding
        self._warm = {True: 0, False: 0}
        self._graphs: dict[bool, Any] = {}

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        seed: int | None = None,
        on_tokens: Callable[[Tensor], Any] | None = None,
        look_every: int = 16,
    ) -> Tensor:
        """Prompts and their continuations; arguments and result are those of `generate`."""
        check_options(max_new_tokens=max_new_tokens, on_tokens=on_tokens, look_every=look_every)
        prompt, shown = self._checked(input_ids, attention_mask, max_new_tokens)
        if seed is None:
            self._generator.seed()
        else:
            check_options(seed=seed)
            self._generator.manual_seed(seed)
        padded = not bool(shown.all())
        self._begin(prompt, shown, padded)
        watched = on_tokens is not None or self._ends.ids
        every = look_every if watched else max_new_tokens
        made = self._run(padded, max_new_tokens, every, on_tokens)
        return torch.cat((prompt, self._state.made[:, :made]), 1)

    def close(self) -> None:
        """Give the memory of the recorded step back; the next call records it again."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._loan.give_back()
        self._warm = {True: 0, False: 0}

    # ------------------------------------------------------------------------------------ the steps

    def _begin(self, prompt: Tensor, shown: Tensor, padded: bool) -> None:
        """Run the prompt, and choose the first tokens."""
        position = (shown.cumsum(1) - 1).clamp_min_(0)
        mask = shown if padded else None
        # a compiled model would be compiled anew for every length of a prompt
        with torch.compiler.set_stance("force_eager"):
            logits = self._logits_of_prompt(prompt, mask, position)
        self._cache = self._caches.for_steps(prompt.shape[1])
        self._state.begin(shown)
        self._state.take(self._sampling.choose(logits, self._generator), self._ends)

    def _logits_of_prompt(self, prompt: Tensor, mask: Any, position: Tensor) -> Tensor:
        """The logits behind the prompt, which is in the cache then.
        Raises GenerationError for a model that is wrong, or fails, with a cache of fixed length."""
        last = {"logits_to_keep": 1} if self._keeps_logits else {}
        name = type(self._original).__name__
        try:
            logits = self._logits(prompt, mask, position, self._caches.for_prompt(), **last)
        except (torch.OutOfMemoryError, CutesuperError):
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            self._logits(prompt, mask, position, None, **last)  # raises what is wrong in any case
            lines = str(error).splitlines() or [type(error).__name__]
            raise GenerationError(
                f"generate({name}): it fails with a cache of fixed length: {lines[0]} (see the "
                "cause of this error); use model.generate"
            ) from error
        if not (self._is_sure or self._original.training):  # dropout draws anew each time
            self._compare(logits, self._logits(prompt, mask, position, None, **last))
            self._is_sure = True
        return logits

    def _compare(self, logits: Tensor, plain: Tensor) -> None:
        """Raise GenerationError if logits of a prompt are not those without a cache."""
        dtype = self._original.get_input_embeddings().weight.dtype
        unit = torch.finfo(dtype if dtype.is_floating_point else torch.bfloat16).eps
        known = plain.masked_fill(~plain.isfinite(), 0)
        most = max(NEAR, ROUNDINGS * unit) * known.abs().max()
        if bool(((logits == plain) | ((logits - plain).abs() <= most)).all()):
            return
        raise GenerationError(
            f"generate({type(self._original).__name__}): its logits are others with a cache of "
            "fixed length than without a cache, so this model of transformers cannot generate with "
            "one; use model.generate"
        )

    def _logits(
        self, tokens: Tensor, mask: Any, position: Tensor, cache: Any, **options: Any
    ) -> Tensor:
        """The logits of the last tokens, float32 ``[B, V]``."""
        made = self._model(
            input_ids=tokens, attention_mask=mask, position_ids=position, past_key_values=cache,
            use_cache=cache is not None, return_dict=True, **options,
        )  # fmt: skip
        return made.logits[:, -1].float()

    def _step(self, padded: bool) -> None:
        """Read the latest tokens, choose the next ones; nothing waits for the device."""
        state = self._state
        like = self._original.get_input_embeddings().weight.new_empty(len(state.token), 0)
        mask = self._caches.masks(state.place, state.shown if padded else None, like)
        logits = self._logits(state.token, mask, state.position, self._cache)
        state.advance()
        state.take(self._sampling.choose(logits, self._generator), self._ends)

    def _next(self, padded: bool) -> None:
        """One step: replayed, or captured after the first ones."""
        if padded not in self._graphs:
            if self._device.type not in KERNEL_DEVICES or self._warm[padded] < WARM_STEPS:
                self._warm[padded] += 1
                return self._step(padded)
            self._graphs[padded] = self._captured(padded)
        return self._graphs[padded].replay()

    def _captured(self, padded: bool) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream(self._device)
        try:
            with self._loan.taken():
                return capture(lambda: self._step(padded), stream, [self._generator])
        except Exception as error:
            first = error.__context__ or error  # the end of a failed capture raises once more
            lines = str(first).splitlines() or [type(first).__name__]
            raise GenerationError(
                f"generate({type(self._original).__name__}): its decoding step cannot be captured "
                f"into a CUDA graph: {lines[0]}; something in the model reads from the device, "
                "moves data from the host or compiles at every step (see the cause of this error): "
                "take that out of the model, or use model.generate"
            ) from first

    def _run(self, padded: bool, most: int, every: int, on_tokens: Any) -> int:
        """Run the steps; the number of tokens up to the end of the last sequence.

        Args:
            padded: whether there is padding.
            most: tokens of a sequence, of which the first is there.
            every: steps between looks at the tokens.
            on_tokens: gets them then.
        """
        going = torch.ones(len(self._state.token), dtype=torch.bool)
        begin, end = 0, 1
        while True:
            new = self._state.made[:, begin:end].cpu()
            count = self._ends.cut(new, going)
            if on_tokens is not None:
                on_tokens(new[:, :count])
            if end == most or not going.any():
                return begin + count
            begin, end = end, min(end + every, most)
            for _ in range(end - begin):
                self._next(padded)

    def _checked(
        self, input_ids: Any, attention_mask: Any, max_new_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Prompts ``[B, L]``, and true where they are no padding, on the device of the model.

        Raises:
            DTypeError, ShapeError: they do not fit the decoder, or padding is on the right.
        """
        if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int32, torch.int64):
            found = getattr(input_ids, "dtype", type(input_ids).__name__)
            raise DTypeError(f"generate(input_ids): {found}; give it an int64 tensor of tokens")
        (batch, room), shape = self._state.made.shape, tuple(input_ids.shape)
        if len(shape) != 2 or shape[0] != batch or shape[1] == 0:
            raise ShapeError(f"generate(input_ids{list(shape)}): must be [{batch}, tokens]")
        if shape[1] + max_new_tokens > room:
            raise ShapeError(
                f"generate(input_ids{list(shape)}, max_new_tokens={max_new_tokens}): there is room "
                f"for {room} positions; make a cutesuper.Decoder with a greater length"
            )
        shown = _shown(input_ids, attention_mask)
        return input_ids.to(self._device, torch.int64), shown.to(self._device, torch.bool)


def _shown(input_ids: Tensor, attention_mask: Any) -> Tensor:
    """A mask of the prompts, 0 at padding.
    Raises ShapeError if it has another shape, or padding that is not on the left."""
    if attention_mask is None:
        return torch.ones_like(input_ids)
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
        raise ShapeError(
            f"generate(input_ids{list(input_ids.shape)}): attention_mask must be a tensor of that "
            "shape, 1 at tokens and 0 at padding"
        )
    if not attention_mask[:, -1].all():
        raise ShapeError(
            "generate(attention_mask): a prompt ends with padding, which must be on the left; "
            'set tokenizer.padding_side = "left"'
        )
    return attention_mask


def generate(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    on_tokens: Callable[[Tensor], Any] | None = None,
    look_every: int = 16,
) -> Tensor:
    """Prompts and the tokens that a model of transformers generates behind them.

    On a GPU, one decoding step is captured into a CUDA graph and replayed, so that the host takes
    no time. For many calls make a `Decoder`, which captures once. Greedy tokens are those of
    ``model.generate(..., do_sample=False)``.

    Args:
        model: a causal language model of transformers on one device: as it is, patched by
            `cutesuper.patch`, or compiled by ``torch.compile``. Prompts run without compilation.
        input_ids: int64 ``[B, L]``, prompts, padded on the left.
        attention_mask: ``[B, L]``, 1 at tokens and 0 at padding; None: no padding.
        max_new_tokens: most tokens of a sequence.
        temperature: divides the logits; 0: the likeliest token is taken.
        top_k: tokens among which one is drawn, the likeliest; None: all.
        top_p: one is drawn among the likeliest tokens that have this probability together.
        seed: of the draws: the same one gives the same tokens; None: another one each time.
        eos_token_id: one or several tokens that end a sequence; None: those of the model's
            ``generation_config``; an empty sequence: none.
        pad_token_id: stands behind the end of a sequence; None: that of ``generation_config``, or
            the first that ends one.
        on_tokens: called with new tokens, int64 ``[B, n]`` on the CPU, after the first and then
            every few steps.
        look_every: steps between looks at the device, for ``on_tokens`` and for the end of all
            sequences.

    Returns:
        int64 ``[B, L + n]`` on the device of the model: as many tokens as the longest sequence has.

    Raises:
        GenerationError: no such model, or one whose steps cannot be replayed; says why.
        ShapeError, DTypeError: prompts or masks that do not fit.
        OptionError: a value that an option cannot have.
    """
    check_options(max_new_tokens=max_new_tokens)
    batch, length = input_ids.shape if getattr(input_ids, "ndim", 0) == 2 else (1, 1)
    room = -(-(length + max_new_tokens) // ROOM) * ROOM
    decoder = Decoder(
        model, batch, room, temperature=temperature, top_k=top_k, top_p=top_p,
        eos_token_id=eos_token_id, pad_token_id=pad_token_id,
    )  # fmt: skip
    try:
        return decoder(
            input_ids, attention_mask, max_new_tokens=max_new_tokens, seed=seed,
            on_tokens=on_tokens, look_every=look_every,
        )  # fmt: skip
    finally:
        decoder.close()


def _device_of(model: Any) -> torch.device:
    """The device of a model that generates.

    Raises:
        GenerationError: it is no causal language model of transformers.
        DeviceError: it is on several devices, or on one without kernels.
    """
    generates = getattr(model, "generation_config", None) is not None
    if not generates or model.config.is_encoder_decoder:
        raise GenerationError(
            f"generate({type(model).__name__}): give it a causal language model of the "
            "transformers library, such as LlamaForCausalLM"
        )
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise DeviceError(
            f"generate({type(model).__name__}): its parameters are on "
            f"{', '.join(sorted(map(str, devices)))}; move it to one GPU, or to the CPU"
        )
    return devices.pop()
