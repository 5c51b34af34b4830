"""What ranks of a mesh have parts of, whole on each of them, so that the judge sees what one process would show."""

from torch import Tensor

from llorch.pytorch.distributed.launch import gathered, summed
from llorch.pytorch.distributed.sharding_plan import COLUMNS, ROWS
from llorch.pytorch.train.worker import Alone, OnMesh


def all_rows(worker: Alone, rows: Tensor, n_rows: int) -> Tensor:
    """Collect the values of all rows of a batch, given the rows that this rank computes."""
    if not isinstance(worker, OnMesh):
        return rows
    rank, found = worker.data_parallel.get_local_rank(), rows.new_zeros(n_rows, *rows.shape[1:])
    if rank < n_rows:
        found[rank :: worker.data_parallel.size()] = rows
    return worker.summed(found)


def own_input(worker: Alone, matrix: str, x: Tensor) -> Tensor:
    """Select the part of a matrix's input, by the matrix's canonical name, that this rank multiplies."""
    if not isinstance(worker, OnMesh) or not _is_one_of(matrix, ROWS):
        return x
    ranks = worker.tensor_parallel
    return x.chunk(ranks.size(), -1)[ranks.get_local_rank()]


def whole_output(worker: Alone, matrix: str, part: Tensor) -> Tensor:
    """Combine the output of a matrix on this rank with the outputs of the other ranks."""
    if not isinstance(worker, OnMesh):
        return part
    if _is_one_of(matrix, ROWS):
        return summed(part.clone(), worker.tensor_parallel)
    return gathered(part, -1, worker.tensor_parallel) if _is_one_of(matrix, COLUMNS) else part


def _is_one_of(matrix: str, paths: tuple[str, ...]) -> bool:
    """Tell if a matrix has the name of one of the paths' modules."""
    return matrix.endswith(tuple(path.rpartition(".")[2] for path in paths))
