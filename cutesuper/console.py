"""Commands that look after an installation: ``cutesuper doctor``, ``cache`` and ``completion``."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cutesuper.errors import CacheError, CutesuperError
from cutesuper.runtime import toolchain
from cutesuper.runtime.cache import CacheEntry, KernelCache, default_root
from cutesuper.version import __version__

# ------------------------------------------------------------------------------------------ doctor


@dataclass(frozen=True)
class Finding:
    """One line of the doctor.

    Attributes:
        what: it is about.
        found: what is there, or what is missing and what to do.
        state: "ok", "none" for what only some calls need, or "bad".
    """

    what: str
    found: str
    state: str = "ok"


def doctor() -> int:
    """Print the installed and the missing parts, with a remedy for each missing one.
    Returns 1 if no kernel can be compiled."""
    findings = list(_findings())
    for f in findings:
        mark = {"ok": "ok     ", "none": "-      ", "bad": "MISSING"}[f.state]
        print(f"{mark}  {f.what:<21}{f.found}")
    return int(any(f.state == "bad" for f in findings))


def _findings() -> Iterator[Finding]:
    yield Finding("cutesuper", __version__)
    yield Finding("Python", f"{platform.python_version()} on {platform.platform()}")
    yield from _torch()
    yield _asked("compiler", _compiler, "bad")
    yield _asked("kernel cache", _cache, "bad")
    yield _asked("C compiler", toolchain.require_c_compiler, "none")
    yield _asked("static CUDA runtime", toolchain.require_cudart_static, "none")
    yield _asked("disassembler", toolchain.require_nvdisasm, "none")


def _asked(what: str, ask: Callable[[], object], state: str) -> Finding:
    """The result of a function, or the error that says what to do."""
    try:
        return Finding(what, str(ask()))
    except CutesuperError as error:
        return Finding(what, str(error), state)


def _compiler() -> str:
    found = toolchain.dsl_versions()
    return f"CuTe DSL {found['dsl']} ({found['flavours']}), TVM-FFI {found['tvm_ffi']}"


def _cache() -> str:
    cache, wanted = KernelCache(), default_root()
    if cache.root != wanted:
        raise CacheError(
            f"{wanted}: cannot be written; set CUTESUPER_CACHE to a folder of your own"
        )
    return str(wanted)


def _torch() -> Iterator[Finding]:
    """PyTorch, and the GPUs that it sees."""
    import torch

    from cutesuper.targets import TARGETS

    yield Finding("PyTorch", f"{torch.__version__}, {_cuda_of(torch.version.cuda)}")
    if not torch.cuda.is_available():
        text = "none: kernels compile for target=, calls on CPU tensors run the reference"
        yield Finding("GPU", text, "none")
        return
    known = {t.arch.rstrip("af") for t in TARGETS.values()}
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name, arch = torch.cuda.get_device_name(index), f"sm_{major}{minor}"
        if arch in known:
            yield Finding(f"GPU {index}", f"{name} ({arch})")
        else:
            text = f"{name} ({arch}): no target; there are {', '.join(sorted(known))}"
            yield Finding(f"GPU {index}", text, "none")


def _cuda_of(version: str | None) -> str:
    return f"CUDA {version}" if version else "without CUDA"


# ------------------------------------------------------------------------------------------- cache


def add_cache(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``cutesuper cache``."""
    actions = {
        "list": "one line for each kernel", "size": "how many there are, and their bytes",
        "clear": "remove all of them", "verify": "read all, and name those that are damaged",
    }  # fmt: skip
    told = "; ".join(f"{name}: {text}" for name, text in actions.items())
    parser.add_argument("action", choices=tuple(actions), help=told)


def cache(action: str) -> int:
    """List, measure, clear or verify the kernels on disk; 1 if ``verify`` finds a damaged one."""
    store = KernelCache()
    return {"list": _list, "size": _size, "clear": _clear, "verify": _verify}[action](store)


def _bytes(entry: CacheEntry) -> int:
    return sum(map(len, entry.files.values()))


def _list(store: KernelCache) -> int:
    for entry in sorted(store.entries(), key=lambda e: e.digest):
        arch, tensors = entry.meta["arch"], _tensors(entry)
        print(f"{entry.digest[:16]}  {arch:<7}  {_bytes(entry):>9} bytes  {tensors}")
    return 0


def _tensors(entry: CacheEntry) -> str:
    """The tensors that a kernel takes: ``16x256 float16, 16x256 float16``."""
    given = entry.meta["arguments"]["arguments"]
    found = [a for a in given if a["kind"] == "tensor"]
    return ", ".join(f"{'x'.join(map(str, a['shape']))} {a['dtype']}" for a in found)


def _size(store: KernelCache) -> int:
    sizes = [_bytes(entry) for entry in store.entries()]
    print(f"{store.root}: {len(sizes)} kernel(s), {sum(sizes)} bytes")
    return 0


def _clear(store: KernelCache) -> int:
    count = sum(1 for _ in store.names())
    store.clear()
    print(f"{store.root}: {count} kernel(s) removed")
    return 0


def _verify(store: KernelCache) -> int:
    damaged = [name for name in store.names() if store.load(name) is None]
    for name in damaged:
        print(f"{name}: damaged; it is compiled again when it is needed")
    print(f"{store.root}: {len(damaged)} damaged kernel(s)")
    return int(bool(damaged))


# -------------------------------------------------------------------------------------- completion

_BASH = """\
_cutesuper() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case "$command $before" in
{values}
    esac
    case "$command" in
{words}
    esac
    COMPREPLY+=($(compgen -f -- "$word"))
}}
complete -o filenames -F _cutesuper cutesuper
"""


@dataclass(frozen=True)
class Words:
    """The words that may follow a command.

    Attributes:
        first: values of its first argument, if they are known.
        options: the values of each option, if they are known.
    """

    first: Sequence[str]
    options: Mapping[str, Sequence[str]]


def words_of(parser: argparse.ArgumentParser, values: Mapping[str, Sequence[str]]) -> Words:
    """The words of a command; ``values`` are those of options that have no choices."""
    first: list[str] = []
    options: dict[str, Sequence[str]] = {}
    for action in parser._actions:
        known = tuple(map(str, action.choices or ()))
        if not action.option_strings:
            first += known
        for option in (o for o in action.option_strings if o.startswith("--")):
            options[option] = known or values.get(option, ())
    return Words(first, options)


def completion(shell: str, commands: Mapping[str, Words]) -> int:
    """Print the completion of a shell, to be read by it.

    Args:
        shell: "bash", "zsh" or "fish".
        commands: by name, the words that each takes.
    """
    if shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print(_fish(commands) if shell == "fish" else _bash(commands), end="")
    return 0


def _bash(commands: Mapping[str, Words]) -> str:
    def reply(words: Iterable[str]) -> str:
        return f'COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word"))'

    values = [
        f'        "{name} {option}") {reply(known)}; return;;'
        for name, words in commands.items()
        for option, known in words.options.items()
        if known
    ]
    words = [f"        {n}) {reply([*w.first, *w.options])};;" for n, w in commands.items()]
    return _BASH.format(
        commands=" ".join(commands), values="\n".join(values), words="\n".join(words)
    )


def _fish(commands: Mapping[str, Words]) -> str:
    lines = [f"complete -c cutesuper -n __fish_use_subcommand -f -a '{' '.join(commands)}'"]
    for name, words in commands.items():
        here = f"complete -c cutesuper -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{here} -a '{' '.join(words.first)}'"] if words.first else []
        for option, known in words.options.items():
            given = f" -x -a '{' '.join(known)}'" if known else ""
            lines.append(f"{here} -l {option[2:]}{given}")
    return "\n".join(lines) + "\n"
