"""A model of the transformers library, patched: norms, MLPs and the loss are ours.

    python examples/transformers_llama.py                  # needs: pip install transformers
    python examples/transformers_llama.py --model qwen3    # norms of heads
    python examples/transformers_llama.py --model gemma    # weights from 0 on, GeGLU

The weights are random, nothing is downloaded. `cs.patch` finds the norms and the MLPs. Logits, loss
and the gradients of all parameters are compared with the same model in float64, ours and the model
as it comes; then a forward and backward pass of both is timed. On a GPU models are bf16, without
one fp32 and tiny.

The exit status is 1 if an error of ours is more than twice that of the model as it comes, plus two
units in the last place.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from common.timing import Clock
from torch import Tensor, nn

import cutesuper as cs

MODELS = {"llama": "Llama", "qwen3": "Qwen3", "gemma": "Gemma"}
EXTENTS = {
    "cpu": {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "head_dim": 16},
    "cuda": {"vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 5632, "head_dim": 128},
}
TOKENS = {"cpu": (2, 32), "cuda": (4, 1024)}
PASSES, WARM_UP = 13, 3


def main() -> int:
    """Compare, then time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=list(TOKENS), default=found, help=f"here: {found}")
    parser.add_argument("--model", choices=list(MODELS), default="llama", help="default: llama")
    args = parser.parse_args()
    try:
        exact = new_model(args.model, args.device)
    except ImportError as error:
        parser.error(f"needs the transformers library, pip install transformers: {error}")
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    tokens = torch.randint(exact.config.vocab_size, TOKENS[args.device], device=args.device)
    theirs = exact.to(dtype)
    ours = copy.deepcopy(theirs)
    print(f"{args.model}, {dtype} on {args.device}\n{cs.patch(ours).report()}")
    fine = compare(theirs, ours, tokens)
    before = passes_ms(theirs, cross_entropy, tokens)
    after = passes_ms(ours, cs.ops.cross_entropy, tokens)
    print(f"forward and backward: as it comes {before:.2f} ms, ours {after:.2f} ms")
    return 0 if fine else 1


def new_model(name: str, device: str) -> Any:
    """A model of four layers with random weights."""
    prefix = MODELS[name]
    library = importlib.import_module(f"transformers.models.{name}")
    config = getattr(library, f"{prefix}Config")(
        **EXTENTS[device], num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
    )
    torch.manual_seed(0)
    model = getattr(library, f"{prefix}ForCausalLM")(config).to(device)
    for module in model.modules():
        if is_norm(module):  # not all the same, as they are at first
            nn.init.uniform_(module.weight, -0.5, 0.5)
            module.weight.data += 1.0 - weight_offset(module)
    return model


def is_norm(module: nn.Module) -> bool:
    """Models have classes of their own for RMSNorm, which differ in names."""
    return type(module).__name__.endswith("RMSNorm")


def weight_offset(module: nn.Module) -> float:
    """The number that is added to the weight of a norm: Gemma keeps the difference from 1."""
    return 1.0 if type(module).__name__.startswith("Gemma") else 0.0


# ----------------------------------------------------------------------------------------- compare


def in_float64(model: Any) -> Any:
    """A copy that computes in float64; norms that come with models go through fp32 in any type."""
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if is_norm(module):
            module.forward = partial(exact_norm, module)
    return exact


def exact_norm(module: Any, x: Tensor) -> Tensor:
    """`forward` of a norm in PyTorch's operators."""
    weight = module.weight + weight_offset(module)
    return F.rms_norm(x, weight.shape, weight, epsilon(module))


def epsilon(module: Any) -> float:
    """The number that a norm adds to the mean of squares."""
    return module.eps if hasattr(module, "eps") else module.variance_epsilon


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The cross entropy of the library: in fp32 at least."""
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)


def run(model: Any, loss_of: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Logits, the loss of the next tokens, and all gradients, by name."""
    model.zero_grad()
    logits = model(input_ids=tokens).logits
    loss = loss_of(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    return {"logits": logits.detach(), "loss": loss.detach(), **gradients}


def compare(theirs: Any, ours: Any, tokens: Tensor) -> bool:
    """Print errors against float64, for gradients the worst one; whether ours are small enough."""
    exact = run(in_float64(theirs), cross_entropy, tokens)
    a, b = run(theirs, cross_entropy, tokens), run(ours, cs.ops.cross_entropy, tokens)
    ulp = torch.finfo(a["logits"].dtype).eps
    errors = {k: (relative(a[k], exact[k]), relative(b[k], exact[k])) for k in exact}
    excess = {k: mine - (2 * other + 2 * ulp) for k, (other, mine) in errors.items()}
    gradient = max((k for k in errors if k.startswith("gradient")), key=excess.__getitem__)
    print(f"{'relative error against float64':52} {'as it comes':>11} {'ours':>8}")
    for k in ("logits", "loss", gradient):
        print(f"{k:52} {errors[k][0]:11.1e} {errors[k][1]:8.1e}")
    fine = all(e <= 0 for e in excess.values())  # an error that is not a number is too large
    print(f"{len(errors)} tensors: " + ("within the rule" if fine else "NOT within the rule"))
    return fine


def relative(x: Tensor, exact: Tensor) -> float:
    """Norm of the error over the norm."""
    return ((x.double() - exact).norm() / exact.norm()).item()


def passes_ms(model: Any, loss_of: Any, tokens: Tensor) -> float:
    """Median of forward and backward passes."""
    clock = Clock(tokens.device)
    for _ in range(PASSES):
        clock.tick()
        run(model, loss_of, tokens)
    clock.tick()
    return median(clock.intervals_ms()[WARM_UP:])


if __name__ == "__main__":
    sys.exit(main())
