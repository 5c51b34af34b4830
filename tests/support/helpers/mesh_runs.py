"""What tests run on every rank of a mesh, with mistakes of a split model to plant."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from llorch.files import open_weights
from llorch.judging.runners.torch import parallel_runners
from llorch.judging.verify import plan_live, verify_live, verify_stored
from llorch.pytorch.device import target
from llorch.pytorch.distributed import parallel, sharding_plan
from llorch.pytorch.distributed.launch import start, summed
from llorch.pytorch.distributed.parallel import LocalExperts, split_experts
from llorch.pytorch.distributed.sharding_plan import COLUMNS, part_of_rank
from llorch.pytorch.models.experts import ExpertsModule
from llorch.stages.comparison import PASS


def of_another_rank(path: str, matrix: Any, ranks: Any) -> Any:
    """The rows of a matrix go to the ranks in another order."""
    moved = matrix.roll(len(matrix) // ranks.size(), 0) if path.rpartition(".")[0].endswith(COLUMNS) else matrix
    return part_of_rank(path, moved, ranks)


def unmasked(self: Any, h: Any, ids: Any, keep: Any) -> Any:
    """Every rank computes all choices, with its own experts where it has not the chosen one."""
    return ExpertsModule.forward(self, h, (ids - self.first).clamp(0, self.gate_proj.n_experts - 1), keep)


def first_shifted(layer: Any, ranks: Any, *args: Any) -> None:
    """Each rank takes its experts for those beside them."""
    split_experts(layer, ranks, *args)
    layer.mlp.experts.first = 3 - layer.mlp.experts.first  # of seven, four and three: 0 and 4


INJECTED: Mapping[str, Callable[[], None]] = {
    "": lambda: None,
    "unsummed": lambda: setattr(parallel, "_leaving", lambda part, ranks: part),
    "unsummed from 500 tokens on": lambda: setattr(
        parallel, "_leaving", lambda part, ranks: part if part.shape[1] > 500 else summed(part, ranks)
    ),
    "averaged": lambda: setattr(parallel, "_leaving", lambda part, ranks: summed(part.clone(), ranks) / ranks.size()),
    "other rank": lambda: setattr(sharding_plan, "part_of_rank", of_another_rank),
    "experts of all ranks": lambda: setattr(LocalExperts, "forward", unmasked),
    "experts of another rank": lambda: setattr(parallel, "split_experts", first_shifted),
}


def compare(
    model: str | Path, n_ranks: int, dtype: str, fault: str = "", with_long: bool = False
) -> tuple[int, int, list[tuple[str, str]]]:
    """Rows of a built-in model, or of a folder beside transformers, on a mesh; with long contexts where asked for.

    Returns:
        How many there are, how many failed, and mode and stage of those that failed.
    """
    INJECTED[fault]()
    torch.set_num_threads(1)
    runners = parallel_runners(target("cpu", dtype, "torch"), start({"dp": 1, "tp": n_ranks}))
    if isinstance(model, Path):
        comparisons = list(verify_live(plan_live(open_weights(model), range(3, 15), ("transformers",)), runners))
    else:
        comparisons = list(verify_stored(model, runners, long=with_long))  # these take six times as long as the rest
    failed = [(c.mode, c.stage_ref.name) for c in comparisons if c.verdict != PASS]
    torch.distributed.destroy_process_group()
    return len(comparisons), len(failed), list(dict.fromkeys(failed))
