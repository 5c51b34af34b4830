"""Import everything that ranks of a mesh use, once, before they are forked."""

import numpy.ma
import torch._dynamo  # FSDP and DTensor import it on first use, which cost more than half of a rank's time
from faults import faulty_ranks

from helpers import mesh_programs, mesh_runs, mesh_training, sharded_runs, split_runs

__all__ = [
    "faulty_ranks", "mesh_programs", "mesh_runs", "mesh_training", "numpy", "sharded_runs", "split_runs", "torch",
]  # fmt: skip
