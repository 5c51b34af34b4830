"""Kernels in Triton's interpreter, and on a device where there is one."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from fakes.quick_interpreter import prepare_once_a_launch

if TYPE_CHECKING:
    import torch


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("triton"):
            prepare_once_a_launch(patch)
        yield


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> "torch.device":
    from helpers.kernel_tolerances import kernel_device

    return kernel_device(request.param)


@pytest.fixture(autouse=True)
def layout_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make packed matrices in the layout of CUDA, also for the interpreter."""
    from llorch.pytorch import random_weights
    from llorch.pytorch.kernels.packing import pack

    monkeypatch.setattr(random_weights, "file_fields", pack)
