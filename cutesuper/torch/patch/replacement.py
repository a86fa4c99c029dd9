"""Modules whose class is replaced: they compute otherwise, and stay the same objects.

A replaced module keeps its parameters, buffers, hooks and children; only its class becomes a
subclass that has another ``forward``, as in ``torch.nn.utils.parametrize``. The subclass has the
name of the original, since models and wrapping policies look at names.
"""

from __future__ import annotations

import copyreg
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

#: the attribute of a replaced module that describes its computation
HOW = "_cutesuper_how"
_MADE = "_cutesuper_made"


_thread = threading.local()


@contextmanager
def as_written() -> Iterator[None]:
    """Let replaced modules run their originals, in this thread."""
    before = _is_as_written()
    _thread.as_written = True
    try:
        yield
    finally:
        _thread.as_written = before


@torch.compiler.assume_constant_result  # nothing in a compiled model asks again
def _is_as_written() -> bool:
    return getattr(_thread, "as_written", False)


class Replacement:
    """Base of the classes put in front of the original one."""

    def replaced(self, *args: Any, **options: Any) -> Any:
        """The result of a call; that of `original` for unsupported ones."""
        raise NotImplementedError

    def original(self, *args: Any, **options: Any) -> Any:
        """The result of the original."""
        return super().forward(*args, **options)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by base classes.
        Subclasses are made on demand, so pickle cannot find them by name."""
        make, args, *state = super().__reduce_ex__(protocol)
        if make is copyreg.__newobj__ and is_own(self):  # type: ignore[attr-defined]
            make, args = _new, (*type(self).__bases__, *args[1:])
        return (make, args, *state)


@cache
def _subclass(replacement: type[Replacement], original: type[nn.Module]) -> type[nn.Module]:
    @wraps(original.forward)  # its arguments are looked at
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        if _is_as_written() or HOW not in self.__dict__:  # undone by a hook, just now
            return original.forward(self, *args, **options)
        return self.replaced(*args, **options)

    def another(cls: type, *args: Any, **options: Any) -> Any:
        """A module that ``type(model)(config)`` makes, which nobody has replaced.
        Without arguments a copy, as PyTorch makes them."""
        if args or options:
            return original(*args, **options)
        return original.__new__(cls)

    names = {
        _MADE: True,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__new__": another,
        "forward": forward,
    }
    return type(original.__name__, (replacement, original), names)


def _new(replacement: type[Replacement], original: type[nn.Module], *args: Any) -> nn.Module:
    return original.__new__(_subclass(replacement, original), *args)


def is_own(module: Any) -> bool:
    """True if the class of a module was made by `replace`, with nothing in front of it."""
    return _MADE in type(module).__dict__


def replace(module: nn.Module, replacement: type[Replacement], how: Any) -> None:
    """Let a module compute as ``replacement`` does."""
    module.__dict__[HOW] = how
    module.__class__ = _subclass(replacement, type(module))


def restore(module: nn.Module) -> None:
    """Undo `replace`."""
    _, module.__class__ = type(module).__bases__
    del module.__dict__[HOW]


def copied(module: nn.Module, **parts: Any) -> nn.Module:
    """A module of the same class and attributes with other parameters or children, without hooks.

    Parameters and buffers that are not named are shared with the original, children are copied.
    """
    kind = type(module)
    maker: Any = kind.__bases__[1] if is_own(module) else kind
    twin: nn.Module = maker.__new__(kind)
    twin.__dict__.update(module.__dict__)
    own = dict(module._parameters)
    twin.__dict__["_parameters"] = own | {k: v for k, v in parts.items() if k in own}
    twin.__dict__["_modules"] = {
        k: parts[k] if k in parts else (None if m is None else copied(m))
        for k, m in module._modules.items()
    }
    for name in _HOOKS:
        twin.__dict__[name] = type(module.__dict__[name])()
    return twin


_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called", "_backward_hooks",
    "_backward_pre_hooks",
)  # fmt: skip


def is_observed(module: nn.Module) -> bool:
    """True if a module has hooks, or its ``forward`` was replaced."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or torch_module._has_any_global_hook()
    )
