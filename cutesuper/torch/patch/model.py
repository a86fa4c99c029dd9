"""`patch`: let a model compute with cutesuper, in place, until that is undone."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import Any

from torch import nn

from cutesuper.errors import PatchError
from cutesuper.torch.patch import logits, mlps, norms, projections, steps
from cutesuper.torch.patch.probing import Failed
from cutesuper.torch.patch.replacement import is_own, restore
from cutesuper.torch.patch.report import Entry, Report, refused
from cutesuper.torch.patch.unclaimed import unclaimed
from cutesuper.torch.patch.usual_calls import ATTENTION_NAME, FLOATS

#: the attribute of a patched model that holds its patch: it is copied and saved with the model
_PATCH = "_cutesuper_patch"


@dataclass(eq=False, repr=False)
class Patch:
    """The replacements made by `patch` in a model; a context manager that undoes them.

    Copies of a patched model, and models that were saved whole and loaded, have their own patch:
    `Patch.of`.
    """

    _model: nn.Module
    _modules: list[nn.Module] = field(default_factory=list)
    _configs: list[tuple[Any, str]] = field(default_factory=list)
    _entries: list[Entry] = field(default_factory=list)

    @staticmethod
    def of(model: nn.Module) -> Patch | None:
        """The patch that a model has now, or None."""
        found = model.__dict__.get(_PATCH)
        return found if isinstance(found, Patch) else None

    def report(self) -> Report:
        """Report of replaced modules, of the others with reasons, and of calls without kernels."""
        return Report(tuple(self._entries), tuple(dict.fromkeys(refused.values())))

    def undo(self) -> None:
        """Restore everything; does nothing if that was done before.

        An implementation of attention that was chosen in the meantime stays.

        Raises:
            PatchError: a replaced module was changed elsewhere in the meantime; nothing is undone
                then.
        """
        for module in self._modules:
            if not is_own(module) or "forward" in module.__dict__:
                paths = (n for n, m in self._model.named_modules() if m is module)
                path = next(paths, "a module that is no longer in the model")
                raise PatchError(
                    f"undo: {path or 'the model'} was wrapped by something else after patch(); "
                    "undo that first"
                )
        for module in self._modules:
            restore(module)
        for config, before in self._configs:
            if config._attn_implementation_internal == ATTENTION_NAME:
                config._attn_implementation_internal = before
        self._modules, self._configs = [], []
        self._model.__dict__.pop(_PATCH, None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a saved patch; its model may be loaded where nothing has been patched before."""
        self.__dict__.update(state)
        if self._configs:
            from cutesuper.torch.patch.attention import register

            register()

    def __repr__(self) -> str:
        return f"Patch({len(self._modules)} modules of {type(self._model).__name__})"

    def __enter__(self) -> Patch:
        """The patch itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Undo the patch."""
        self.undo()


def patch(
    model: nn.Module,
    *,
    norms: bool = True,
    mlp: bool = True,
    qkv: bool = True,
    attention: bool = True,
    loss: bool = True,
    step: bool = True,
) -> Patch:
    """Let a model compute with cutesuper: norms, MLPs, projections, attention, loss, and steps.

    Modules are recognized by their results, not by their names: copies are called on random
    numbers, and so is each replacement before it is installed. Parameters, ``state_dict``, hooks
    and the modules themselves stay the same objects; optimizers, checkpoints and ``generate`` are
    unaffected.

    Args:
        model: a model in the style of the transformers library, on any device, for inference or
            training. It is changed in place.
        norms: RMSNorm and LayerNorm, those of heads too: `cutesuper.ops.rms_norm` and `layer_norm`.
        mlp: gated MLPs: `cutesuper.ops.swiglu` and `geglu`, and without gradients, for few
            positions, a program of the whole MLP.
        qkv: the projections of attention: without gradients, for few positions, one program.
        attention: `cutesuper.ops.attention`: training, prompts without a mask, and decoding with a
            cache of fixed length.
        loss: in training, the cross entropy of logits that nothing else reads:
            `cutesuper.ops.linear_cross_entropy`.
        step: without gradients, few positions with a cache of fixed length: the whole model, by
            ``torch.compile(backend="cutesuper")`` at the first such call.

    Returns:
        A `Patch`: ``report()`` lists the changes, ``undo()`` undoes them, as does leaving ``with
        cs.patch(model):``.

    Raises:
        PatchError: ``model`` is not a module, or it, or a part of it, is already patched.
    """
    if not isinstance(model, nn.Module):
        raise PatchError(f"patch({type(model).__name__}): give it a model, a torch.nn.Module")
    _check_unpatched(model)
    made = Patch(model)
    kinds = [k for k, wanted in zip(_KINDS, (norms, mlp, qkv), strict=True) if wanted]
    for path, module in list(model.named_modules()):
        kind = next((k for k in kinds if k.is_candidate(module)), None)
        if kind is projections and (why := projections.apart(model, path)):
            made._entries.append(Entry(path, type(module).__name__, why=why))
        elif kind is not None:
            made._entries.append(_replaced(made, kind, path, module))
    if mlp:
        made._entries += unclaimed(model, {e.path for e in made._entries})
    if loss and (head := logits.head_of(model)) is not None:
        made._entries.append(_replaced(made, logits, *head))
    if step and (whole := steps.head_of(model)) is not None:
        made._entries.append(_replaced(made, steps, *whole))
    if attention:
        entries, made._configs = _attention_of(model)
        made._entries += entries
    model.__dict__[_PATCH] = made
    return made


#: modules that find and replace parts of models; a part that one recognizes is not offered to the
#: next
_KINDS: tuple[ModuleType, ...] = (norms, mlps, projections)


def _check_unpatched(model: nn.Module) -> None:
    if Patch.of(model) is not None:
        raise PatchError(
            "patch: this model is patched already; undo that first, cs.Patch.of(model).undo()"
        )
    for path, module in model.named_modules():
        if is_own(module) or Patch.of(module) is not None:
            raise PatchError(
                f"patch: {path or 'this module'} is patched already, with a model that it is or "
                "was a part of; undo that first"
            )


def _replaced(made: Patch, kind: ModuleType, path: str, module: nn.Module) -> Entry:
    """Replace a candidate, or report why it was left."""
    was = type(module).__name__
    try:
        _check_usable(module)
        how = kind.find(module)
        made._modules += kind.install(module, how)
    except Failed as reason:
        return Entry(path, was, why=str(reason))
    return Entry(path, was, str(how))


def register_attention() -> None:
    """Make ``attn_implementation="cutesuper"`` known to transformers.
    `cutesuper.ops.attention` for training, prompts without a mask, and decoding with a cache of
    fixed length, else ``"sdpa"``. `patch` does this by itself.

    Raises:
        PatchError: transformers is not installed, or too old.
    """
    try:
        from cutesuper.torch.patch.attention import register
    except ImportError as error:
        raise PatchError(f"register_attention: it takes a newer transformers: {error}") from error
    register()


def _attention_of(model: nn.Module) -> tuple[list[Entry], list[tuple[Any, str]]]:
    """Replace attention, if it is that of transformers."""
    classes = {c for m in model.modules() for c in type(m).__mro__}
    if not any(c.__module__.startswith("transformers.") for c in classes):
        return [], []
    try:
        from cutesuper.torch.patch.attention import install
    except ImportError as error:
        return [Entry("", "attention", why=f"it takes a newer transformers: {error}")], []
    return install(model)


def _check_usable(module: nn.Module) -> None:
    if "forward" in module.__dict__:
        raise Failed("its forward was replaced by something else")
    for p in module.parameters():
        if p.device.type not in ("cpu", "cuda"):
            raise Failed(f"its parameters are on the device {p.device}")
        if p.dtype not in FLOATS:
            raise Failed(f"its parameters are {p.dtype}")
