"""Pure float64 for the float64 reference, which unmodified transformers computes.

`model.double()` is not enough: norms, RoPE, the softmax and the loss of transformers go through float32 by name. Every
such cast is an operator call that a dispatch mode sees, below autograd; each float dtype that is asked for becomes
float64. A run in which any operator still makes a narrower number is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Float64Everywhere(TorchDispatchMode):
    """Turns every float dtype that an operator is asked for into float64."""

    def __init__(self, *, refuse: bool) -> None:
        """Prepare; while files are read there are narrower results, which `refuse` refuses."""
        super().__init__()
        self._refuse = refuse

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator, as wide as it goes."""
        kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        made = func(*map(_widened, args), **kwargs)
        if func is torch.ops.aten.lift_fresh.default and made.dtype in NARROW:
            return made.double()  # numbers of NumPy, on their way in
        if self._refuse and any(
            isinstance(kernel, torch.Tensor) and kernel.dtype in NARROW for kernel in tree_leaves(made)
        ):
            raise RuntimeError(f"float64 reference: {func} computed below float64, so this run is no reference")
        return made


@contextmanager
def float64_everywhere(*, refuse: bool = True) -> Iterator[None]:
    """Compute in float64 whatever the code inside asks for; models must be made inside too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64Everywhere(refuse=refuse):
            yield
    finally:
        torch.set_default_dtype(before)


def _widened(value: Any) -> Any:
    """Return float64 for a narrower torch dtype, any other value as it is."""
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
