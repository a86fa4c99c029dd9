"""AdamW as row programs: one kernel for all parameters of a kind.
It reads and writes everything once.

The numbers of a step (bias corrections, rate, decay, clipping) are tensors on the device, so that
steps with any of them run the same kernels and can be captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from cutesuper.errors import DeviceError, DTypeError, LayoutError, OperatorError
from cutesuper.ir.dims import Symbol
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.graph import KernelGraph, Tensor
from cutesuper.runtime.programs import is_capturing
from cutesuper.runtime.tensors import usable
from cutesuper.torch.ops.lists import ROWS, Lists, row_length
from cutesuper.torch.ops.programs import Program, program_of

#: lists of parameters whose rows an optimizer remembers
LISTS = 32
#: numbers of a step for each parameter
_NUMBERS = ("rate", "decay", "correction")
#: added to the norm that gradients are clipped by, as in `torch.nn.utils.clip_grad_norm_`
_CLIP_EPS = 1e-6
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Kind:
    """Everything that determines the kernel of some parameters.

    Attributes:
        row: elements of a row.
        same: true if the numbers of a step are the same for all parameters.
        types: element types of parameter, gradient, and both moments.
        master: true if the parameter is rounded from one in float32.
        clips: true if gradients are multiplied by a number.
        maximize, betas, eps: of the optimizer.
    """

    row: int
    same: bool
    types: tuple[str, str, str]
    master: bool
    clips: bool
    maximize: bool
    betas: tuple[float, float]
    eps: float

    def graph(self) -> KernelGraph:
        """The update of a parameter (arXiv:1711.05101), outputs in the order of `outputs`.

        Attributes of the step: ``rate = lr / (1 - beta1^t)``, ``decay = 1 - lr weight_decay``,
        ``correction = 1 / sqrt(1 - beta2^t)``.
        """
        g, rows = KernelGraph(), Symbol("M", ROWS)
        old, dtype = ("master", "float32") if self.master else ("param", self.types[0])
        kinds = {old: dtype, "grad": self.types[1], **dict.fromkeys(_MOMENTS, self.types[2])}
        given = {name: g.new_input((rows, self.row), dtype, name) for name, dtype in kinds.items()}
        own = 1 if self.same else rows
        n = {name: g.new_input((own, 1), "float32", name) for name in _NUMBERS}
        slope = given["grad"]
        if self.clips:
            slope = g.mul(slope, g.new_input((1, 1), "float32", "clip"))
        m, v = self._moments(g, given, slope)
        moved = g.div(m, g.add(g.mul(g.sqrt(v), n["correction"]), self.eps))
        step = g.mul(moved, n["rate"])
        kept = g.mul(given[old], n["decay"])
        new = g.add(kept, step) if self.maximize else g.sub(kept, step)
        for t in (m, v):
            g.mark_output(t, self.types[-1])
        if self.master:
            g.mark_output(new, "float32")
            new = g.convert(new, self.types[0])
        g.mark_output(new, self.types[0])
        return g

    def _moments(
        self, g: KernelGraph, given: dict[str, Tensor], slope: Tensor
    ) -> tuple[Tensor, Tensor]:
        first, second = self.betas
        m = g.add(given["exp_avg"], g.mul(g.sub(slope, given["exp_avg"]), 1.0 - first))
        v = g.add(g.mul(given["exp_avg_sq"], second), g.mul(g.square(slope), 1.0 - second))
        return m, v

    @property
    def outputs(self) -> tuple[str, ...]:
        """The tensors that the outputs replace."""
        return (*_MOMENTS, *(("master",) if self.master else ()), "param")

    def program(self, device: torch.device) -> Program:
        """The program for lists of tensors on a device."""
        made = (f"out{n}" for n in range(len(self.outputs)))
        names = ("grad", *self.outputs, *made)
        return program_of("AdamW", self, self.graph, device, scattered=names)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with one kernel for all parameters of a type and a group.

    ``state_dict`` is that of PyTorch, with a further ``master`` for each parameter that has one; it
    can be loaded by either class.

    Args:
        params, lr, betas, eps, weight_decay: as in PyTorch.
        maximize, capturable: as in PyTorch. A capturable step reads nothing from the device, and lr
            may be a tensor there.
        max_norm: gradients are clipped by their global norm, as by
            `torch.nn.utils.clip_grad_norm_`, which must not be called then; None: they are not. The
            gradients themselves stay as they are, and ``grad_norm`` is the norm of the last step.
        master_weights: keep parameters of 16 bits in float32 too, and moments in float32: small
            steps are not lost. Otherwise moments have the type of their parameter, as in PyTorch.

    Raises:
        OperatorError: an option that is no positive number.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        capturable: bool = False,
        max_norm: float | None = None,
        master_weights: bool = False,
    ) -> None:
        if max_norm is not None and not 0.0 < float(max_norm) < math.inf:
            raise OperatorError(f"AdamW(max_norm={max_norm}): must be positive and finite, or None")
        self.max_norm, self.master_weights = max_norm, master_weights
        self.grad_norm: torch.Tensor | None = None
        self._lists: dict[tuple[object, ...], Lists] = {}
        super().__init__(
            params, lr, betas, eps, weight_decay, maximize=maximize, capturable=capturable
        )

    def __getstate__(self) -> dict[str, Any]:
        own = {n: getattr(self, n) for n in ("max_norm", "master_weights", "grad_norm")}
        return {**super().__getstate__(), **own, "_lists": {}}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss again, which is returned.

        Raises:
            OperatorError: a loaded option that this class does not have (amsgrad).
            DeviceError: a step that is not capturable, in the capture of a CUDA graph.
            DTypeError, LayoutError: a parameter or gradient that is not dense, contiguous and of a
                floating-point type.
            SearchError, LoweringError, ScheduleError, CompileError: no kernel for a parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(g, [p for p in g["params"] if p.grad is not None and p.numel()])
                  for g in self.param_groups]  # fmt: skip
        clip = self._clip([p.grad for _, params in groups for p in params])
        for group, params in groups:
            if params:
                _refuse_capture(group, params)
                self._update(group, params, clip)
        return loss

    def _clip(self, gradients: list[Any]) -> torch.Tensor | None:
        """The factor of all gradients, of one pass that computes their norm."""
        if self.max_norm is None or not gradients:
            return None
        parted = [g for g in gradients if _local(g) is not g]
        own = [g for g in gradients if _local(g) is g]
        first = _local(gradients[0]).device
        norms = [_norm(some).to(first) for some in (parted, own) if some]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        self.grad_norm = norm
        return (self.max_norm / (norm + _CLIP_EPS)).clamp(max=1.0).view(1, 1)

    def _update(
        self, group: dict[str, Any], params: list[torch.Tensor], clip: torch.Tensor | None
    ) -> None:
        if group["amsgrad"]:
            raise OperatorError(
                "AdamW: the loaded state has amsgrad=True, which is not supported; use "
                "torch.optim.AdamW"
            )
        states = [self._state(p, group) for p in params]
        steps = [s["step"] for s in states]
        torch._foreach_add_(steps, 1.0)
        same = not steps[0].is_cuda and len({s.item() for s in steps}) == 1
        kinds: dict[tuple[_Kind, torch.device], list[int]] = {}
        own = [{"param": p.detach(), "grad": p.grad, **s}
               for p, s in zip(params, states, strict=True)]  # fmt: skip
        own = [{name: _local(t) for name, t in given.items()} for given in own]
        for n, given in enumerate(own):
            if given["param"].numel():  # of a sharded one other processes may have all
                kind = _kind_of(group, given, same, clip is not None)
                kinds.setdefault((kind, given["param"].device), []).append(n)
        for (kind, device), which in kinds.items():
            numbers = _numbers(group, [steps[n] for n in (which[:1] if same else which)])
            if same:  # in places of 16 bytes
                numbers = numbers.expand(-1, 4).contiguous()
            some = [own[n] for n in which]
            self._run(kind, some, numbers.to(device, non_blocking=True), clip)
        torch.autograd.graph.increment_version(params)

    def _state(self, p: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, made if it has none."""
        if p.dtype not in _FLOATS:
            raise DTypeError(f"AdamW: a parameter {list(p.shape)} is {p.dtype}; use float types")
        state = self.state[p]
        wide = self.master_weights and p.dtype != torch.float32
        if "step" not in state:
            device = p.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in _MOMENTS:
                state[name] = torch.zeros_like(p, dtype=torch.float32 if wide else p.dtype)
        if wide and "master" not in state:
            state["master"] = p.detach().float()
            for name in _MOMENTS:
                state[name] = state[name].float()
        return state

    def _run(
        self,
        kind: _Kind,
        some: list[dict[str, Any]],
        numbers: torch.Tensor,
        clip: torch.Tensor | None,
    ) -> None:
        """Update parameters of a kind and their states in place, in one launch."""
        device = numbers.device
        given = {name: [t[name] for t in some] for name in ("grad", *kind.outputs)}
        aligned = {name: [_usable(t, name) for t in tensors] for name, tensors in given.items()}
        own: dict[str, torch.Tensor] = dict(zip(_NUMBERS, numbers, strict=True))
        if kind.same:
            own = {name: t[:1].view(1, 1) for name, t in own.items()}
        if clip is not None:
            own["clip"] = clip.to(device)
        rows = tuple(t.numel() // kind.row for t in aligned["param"])
        lists = self._lists_of(device, kind.row, rows)
        lists.run(kind.program(device), aligned, own, kind.outputs)
        for name in kind.outputs:
            for t, made in zip(given[name], aligned[name], strict=True):
                if made is not t:
                    t.copy_(made if made.shape == t.shape else made[0])

    def _lists_of(self, device: torch.device, length: int, rows: tuple[int, ...]) -> Lists:
        """Lists of tensors with these rows.
        Those that no graph has captured are forgotten in time, since which parameters have
        gradients may change with every step."""
        key = device, length, rows
        if key not in self._lists:
            old = [k for k, lists in self._lists.items() if not lists.captured]
            for k in old[: max(0, len(old) - LISTS + 1)]:
                del self._lists[k]
            self._lists[key] = Lists(rows, length, device)
        return self._lists[key]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class or of `torch.optim.AdamW`.

        PyTorch gives all state the type of its parameter; what is float32 here stays so.
        """
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        own = chain.from_iterable(g["params"] for g in self.param_groups)
        for number, p in zip(saved, own, strict=True):
            given = state_dict["state"].get(number, {})
            for name in (*_MOMENTS, "master"):
                if name in given and self.master_weights:
                    wide = given[name].detach().clone()
                    self.state[p][name] = wide.to(p.device, torch.float32)


def _local(t: Any) -> torch.Tensor:
    """The part of this process of a sharded tensor (`torch.distributed.tensor.DTensor`)."""
    found: torch.Tensor = t.to_local() if hasattr(t, "to_local") else t
    return found


def _norm(gradients: list[Any]) -> torch.Tensor:
    """The norm of all elements, float32, of all processes for sharded tensors."""
    norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
    first = norms[0].device
    norm: Any = torch.linalg.vector_norm(torch.stack([n.to(first) for n in norms]))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _kind_of(
    group: dict[str, Any], given: dict[str, torch.Tensor], same: bool, clips: bool
) -> _Kind:
    types: Any = tuple(as_dtype(given[n].dtype).name for n in ("param", "grad", "exp_avg"))
    first, second = map(float, group["betas"])
    return _Kind(
        row_length(given["param"].numel()), same, types, "master" in given, clips,
        group["maximize"], (first, second), group["eps"],
    )  # fmt: skip


def _refuse_capture(group: dict[str, Any], params: list[torch.Tensor]) -> None:
    """Raise DeviceError in a capture that would repeat the numbers of one step."""
    if params[0].is_cuda and not group["capturable"] and is_capturing():
        raise DeviceError(
            "AdamW(capturable=False): a CUDA graph would repeat the numbers of one step; make the "
            "optimizer with capturable=True"
        )


def _numbers(group: dict[str, Any], steps: list[torch.Tensor]) -> torch.Tensor:
    """Float32 numbers for each parameter, ``[len(_NUMBERS), n]``.
    They are computed in float64 where the steps are counted."""
    t = torch.stack([s.to(steps[0].device) for s in steps]).double()
    first, second = (1.0 - beta**t for beta in map(float, group["betas"]))
    lr = group["lr"]
    lr = lr.to(t.device, torch.float64) if isinstance(lr, torch.Tensor) else lr
    decay = torch.ones_like(t) * (1.0 - lr * group["weight_decay"])
    return torch.stack([lr / first, decay, second.rsqrt()]).float()


def _usable(t: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor of a parameter as kernels read it.
    A single element is put beside itself, since no kernel has rows of one. Raises LayoutError if it
    is no dense one."""
    if t.layout is not torch.strided or not (t.is_contiguous() or name == "grad"):
        raise LayoutError(
            f"AdamW: {name} {list(t.shape)} is not contiguous (strides {t.stride()}); make "
            ".contiguous() of the parameter before it is given to the optimizer"
        )
    return usable(t if t.numel() > 1 else t.view(1).expand(2))


__all__ = ["AdamW"]
