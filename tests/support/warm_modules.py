"""Import everything that ranks of a mesh use, once, before they are forked."""

import faulty_ranks
import mesh_programs
import mesh_runs
import mesh_training
import numpy.ma
import sharded_runs
import split_runs
import torch._dynamo  # FSDP and DTensor import it on first use, which cost more than half of a rank's time

__all__ = [
    "faulty_ranks", "mesh_programs", "mesh_runs", "mesh_training", "numpy", "sharded_runs", "split_runs", "torch",
]  # fmt: skip
