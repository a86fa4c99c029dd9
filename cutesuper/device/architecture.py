"""The building blocks of the architecture that is being compiled for."""

from __future__ import annotations

from cutlass.cutlass_dsl import CuTeDSL

from cutesuper.device.products import Products


def products() -> Products:
    """The tensor cores of the architecture that is being compiled for.

    Raises:
        NotImplementedError: if there are no building blocks for them.
    """
    arch = CuTeDSL._get_dsl().get_arch_enum().to_string()
    if arch.startswith("sm_90"):
        from cutesuper.device.hopper.products import WarpgroupProducts

        return WarpgroupProducts()
    if arch.startswith(("sm_100", "sm_103")):
        from cutesuper.device.blackwell.products import TensorProducts

        return TensorProducts()
    raise NotImplementedError(f"no building blocks for matrix products of {arch}")
