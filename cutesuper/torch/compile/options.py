"""Options of ``torch.compile(model, backend="cutesuper", options={...})``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from cutesuper.errors import OptionError
from cutesuper.ir.arguments import shown
from cutesuper.targets import Target, find_target
from cutesuper.torch.internals import inductor_options, mode_options

Take = Literal["faster", "modelled", "all"]


@dataclass(frozen=True)
class BackendOptions:
    """Options of the backend.

    Attributes:
        take: which regions get kernels of this package: "faster", those measured faster than
            Inductor's code on this GPU; "modelled", those that the cost model expects to be;
            "all", whatever can be lowered. The rest is Inductor's.
        target: the GPU to optimize for; None is the one of the tensors.
        budget_s: seconds that each search may take; None is no limit.
        inductor: options of Inductor, like ``{"triton.cudagraphs": True}``.
    """

    take: Take = "faster"
    target: Target | None = None
    budget_s: float | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict, hash=False)


def read_options(given: Mapping[str, Any] | None, mode: str | None = None) -> BackendOptions:
    """Check the user's options.

    Args:
        given: ``options`` of ``torch.compile``.
        mode: that of ``torch.compile``: options of Inductor under a name.

    Raises:
        OptionError: an option that does not exist, or a value that it cannot have.
        DeviceError: no such target.
    """
    if not isinstance(given, Mapping | None):
        raise OptionError(
            f"backend 'cutesuper': options={shown(given)}; they are a dictionary, as "
            "options={'take': 'all'}"
        )
    given = dict(given or {})
    known = [f.name for f in fields(BackendOptions)]
    for name in given:
        if name not in known:
            raise OptionError(
                f"backend 'cutesuper': there is no option {name!r}, only {', '.join(known)}; "
                "options of Inductor go into 'inductor', as "
                "options={'inductor': {'triton.cudagraphs': True}}"
            )
    return BackendOptions(
        take=_take(given.get("take", "faster")),
        target=_target(given.get("target")),
        budget_s=_budget(given.get("budget_s")),
        inductor={**_mode(mode), **_inductor(given.get("inductor", {}))},
    )


def _take(value: Any) -> Take:
    if value not in get_args(Take):
        raise OptionError(
            f"backend 'cutesuper': take={value!r}; it is one of "
            f"{', '.join(map(repr, get_args(Take)))}"
        )
    return value


def _target(value: Any) -> Target | None:
    if value is None or isinstance(value, Target):
        return value
    if isinstance(value, str):
        return find_target(value)
    raise OptionError(
        f"backend 'cutesuper': target={value!r}; give it the name of a GPU, like 'h200', or a "
        "cutesuper.Target"
    )


def _budget(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and value > 0):
        raise OptionError(
            f"backend 'cutesuper': budget_s={value!r}; it is a positive number of seconds, or None"
        )
    return value


def _inductor(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise OptionError(
            f"backend 'cutesuper': inductor={value!r}; it is a dictionary of Inductor's options"
        )
    unknown = [name for name in value if name not in inductor_options()]
    if unknown:
        raise OptionError(
            f"backend 'cutesuper': Inductor of this version has no option "
            f"{', '.join(map(repr, unknown))}; see torch._inductor.list_options()"
        )
    if value.get("cpp_wrapper"):
        raise OptionError(
            "backend 'cutesuper': inductor={'cpp_wrapper': True}: kernels are called from Python; "
            "leave it out"
        )
    return dict(value)


def _mode(mode: str | None) -> dict[str, Any]:
    if mode is None:
        return {}
    try:
        return mode_options(mode)
    except (KeyError, RuntimeError) as error:  # the first one until torch 2.6
        raise OptionError(
            f"backend 'cutesuper': mode={mode!r}: torch.compile has no such mode ({error})"
        ) from error
