"""What tests run on every rank of a mesh, with mistakes of a split model to plant."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from llorch.pytorch import parallel
from llorch.pytorch.device import target
from llorch.pytorch.ranks import start
from llorch.verify.judge import PASS
from llorch.verify.models import verify_live, verify_stored
from llorch.verify.runners.torch import parallel_runners


class Unsummed(RowwiseParallel):
    """Each rank goes on with its own part of the sum."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        return outputs.to_local()


class Averaged(RowwiseParallel):
    """Parts are averaged, as gradients of equal batches are."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        whole = RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)
        return whole / device_mesh.size()


class OtherRank(ColwiseParallel):
    """The rows of a matrix go to the ranks in another order."""

    def _partition_linear_fn(self, name: str, module: Any, device_mesh: Any) -> None:
        rows = module.weight.shape[0] // device_mesh.size()
        module.weight = torch.nn.Parameter(module.weight.roll(rows, 0), requires_grad=False)
        super()._partition_linear_fn(name, module, device_mesh)


PLANTED: Mapping[str, Callable[[], None]] = {
    "": lambda: None,
    "unsummed": lambda: setattr(parallel, "RowwiseParallel", Unsummed),
    "averaged": lambda: setattr(parallel, "RowwiseParallel", Averaged),
    "other rank": lambda: setattr(parallel, "ColwiseParallel", OtherRank),
}


def judged(model: str | Path, n_ranks: int, dtype: str, plant: str = "") -> tuple[int, int, list[tuple[str, str]]]:
    """Rows of a built-in model, or of a folder beside transformers, on a mesh.

    Returns:
        How many there are, how many failed, and mode and stage of those that failed.
    """
    PLANTED[plant]()
    torch.set_num_threads(1)
    runners = parallel_runners(target("cpu", dtype, "torch"), start({"tp": n_ranks}))
    live = isinstance(model, Path)
    rows = list(verify_live(model, range(3, 15), ("transformers",), runners) if live else verify_stored(model, runners))
    failed = [(row.mode, row.stage) for row in rows if row.verdict != PASS]
    torch.distributed.destroy_process_group()
    return len(rows), len(failed), list(dict.fromkeys(failed))
