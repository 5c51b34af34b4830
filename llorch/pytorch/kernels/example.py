"""An example that a kernel is checked on: a module of torch, and its inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llorch.pytorch.device import Target


@dataclass(frozen=True)
class KernelExample:
    """A module of torch and the inputs with which it is called."""

    plain: Any
    inputs: Callable[[torch.dtype], Sequence[tuple]]  # the same numbers in any dtype; the first are those of decoding
    call: Callable[..., Tensor | tuple[Tensor, ...]] = lambda kernel, *given: kernel(*given)
    wide: torch.dtype = torch.float64  # in which torch's module is the reference


class Numbers:
    """Random numbers in a dtype, on a device."""

    def __init__(self, at: Target) -> None:
        """Begin with the same ones every time."""
        self.at, self.generator = at, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        """Draw normal random numbers of size 1."""
        return torch.randn(*shape, generator=self.generator).to(self.at.device, self.at.dtype)
