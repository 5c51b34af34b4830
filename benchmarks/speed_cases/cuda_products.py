"""Speed of products with packed matrices on CUDA: the time of each kernel, by kind of matrix and number of rows.

Launches over four matrices in turn are recorded and replayed, so that neither the host nor the second-level cache
counts. `bound` is the time of a copy of the packed bytes. `decode` writes the matrix in bfloat16. The other columns are
the ways of `llorch.pytorch.kernels.triton.quantised`: `few` reads the blocks, `tiles` decodes where tensor cores read,
`library` decodes into scratch memory. Kernels are built before, in processes side by side.
"""

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from llorch.apps.bench.measure import COPY_BYTES, best_time
from llorch.files.quant import GGMLType
from llorch.files.quantised.codes import E2M1, E4M3, INT8, integers
from llorch.files.quantised.fields import Table
from llorch.pytorch.kernels.packing import Fields, Kind, shorten
from llorch.pytorch.random_weights import TABLE_EXAMPLES, random_fields

from .rounds import Results

Product = Callable[[torch.Tensor, Fields, Kind], torch.Tensor]
FOUR, EIGHT = "TABLE_4", "TABLE_8"
KINDS: Mapping[str, tuple[Kind, int, str, torch.dtype]] = {
    "Q4_0": (GGMLType.Q4_0, 0, "", torch.float16),
    "Q4_K": (GGMLType.Q4_K, 0, "", torch.float16),
    "Q8_0": (GGMLType.Q8_0, 0, "", torch.float16),
    "GPTQ 4": (Table(FOUR, integers(4, offset=8).tobytes()), 128, "", torch.float16),
    "AWQ": (Table(FOUR, integers(4).tobytes(), has_zeros=True), 128, "zero", torch.float16),
    "MLX 4": (Table(FOUR, integers(4).tobytes()), 64, "minimum", torch.bfloat16),
    "MLX 4, float32": (Table(FOUR, integers(4).tobytes()), 64, "minimum", torch.float32),
    "NF4": (TABLE_EXAMPLES["NF4"], 64, "", torch.float32),
    "NVFP4": (Table(FOUR, E2M1.tobytes(), divisor=0.3), 16, "", torch.float16),
    "MLX 8": (Table(EIGHT, integers(8).tobytes()), 64, "minimum", torch.bfloat16),
    "GPTQ 8": (Table(EIGHT, integers(8, offset=128).tobytes()), 128, "", torch.float16),
    "INT8": (Table(EIGHT, INT8.tobytes()), 4096, "", torch.bfloat16),
    "FP8, rows": (Table(EIGHT, E4M3.tobytes()), 4096, "", torch.bfloat16),
    "FP8, blocks": (Table(EIGHT, E4M3.tobytes()), 128, "", torch.float32),
}  # columns of a scale, the field of offsets, and the dtype that holds the scales of such a folder
MATRICES, LAUNCHES = 4, 12


def random_matrix(name: str, shape: tuple[int, int]) -> Fields:
    """Draw one matrix on the device: any codes, zero points of 8, and equal scales, except those that are float32."""
    kind, group, offset, dtype = KINDS[name]
    device = torch.device("cuda")
    if not isinstance(kind, Table):
        return random_fields(shape, kind, device)
    n_bytes = shape[1] // 2 if kind.name == FOUR else shape[1]
    codes = torch.randint(0, 256, (shape[0], n_bytes), dtype=torch.uint8, device=device)
    if kind.values == E4M3.tobytes():
        codes = codes.where(codes % 128 != 127, 0)  # codes without 127 and 255, which are NaN
    d = torch.full((shape[0], shape[1] // group), 0.003, device=device).to(dtype).float()
    d += 0 if dtype is not torch.float32 else torch.rand_like(d) / 1000
    fields = {"codes": codes, "d": d}
    if offset:
        fields[offset] = torch.full_like(d, 8.0) if offset == "zero" else -8 * d
    return shorten(fields)


def ways(n_rows: int) -> dict[str, Product]:
    """List the kernels that take a number of rows."""
    from llorch.pytorch.kernels.triton.quantised import multiply_by_decoded_tiles, multiply_by_library
    from llorch.pytorch.kernels.triton.quantised_matvec import multiply_few_rows

    kernels: dict[str, tuple[Callable, int, int]] = {
        "few": (multiply_few_rows, 1, 8), "tiles": (multiply_by_decoded_tiles, 2, 64),
        "library": (multiply_by_library, 2, 1 << 20),
    }  # fmt: skip
    return {name: partial(_no_bias, kernel) for name, (kernel, low, high) in kernels.items() if low <= n_rows <= high}


def _no_bias(kernel: Callable, x: torch.Tensor, fields: Fields, kind: Kind) -> torch.Tensor:
    return kernel(x, fields, kind, None)


def decoded(x: torch.Tensor, fields: Fields, kind: Kind) -> torch.Tensor:
    """Decode the matrix, without a product."""
    from llorch.pytorch.kernels.triton.quantised import decode_to

    return decode_to(fields, kind, x.dtype)


def build(name: str, rows: Sequence[int], n_in: int) -> None:
    """Build all kernels of a kind; later processes find them on the disk."""
    kind, fields = KINDS[name][0], random_matrix(name, (64, n_in))
    for n in rows:
        x = torch.randn(n, n_in, device="cuda", dtype=torch.bfloat16)
        for product in (*ways(n).values(), decoded):
            product(x, fields, kind)


def recorded_time(product: Product, x: torch.Tensor, matrices: Sequence[Fields], kind: Kind) -> float:
    """Return the microseconds of one product: the best replay of twelve recorded ones."""
    product(x, matrices[0], kind)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in range(LAUNCHES):
            product(x, matrices[launch % MATRICES], kind)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return best_time(replay) / LAUNCHES * 1e6


def copy_rate() -> float:
    """Return the bytes per second that a copy on the device reads and writes."""
    source = torch.ones(COPY_BYTES["cuda"], dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * len(source) / best_time(lambda: (target.copy_(source), torch.cuda.synchronize()))


def add_products(results: Results, names: Sequence[str], rows: Sequence[int], shape: tuple[int, int]) -> None:
    """Add the times of all kinds: the bound, decoding, and each kernel for each number of rows."""
    workers = min(len(names), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(partial(build, rows=rows, n_in=shape[1]), names))
    rate = copy_rate()
    for name in names:
        kind, matrices = KINDS[name][0], [random_matrix(name, shape) for _ in range(MATRICES)]
        n_bytes = sum(field.numel() * field.element_size() for field in matrices[0].values())
        x = torch.randn(max(rows), shape[1], device="cuda", dtype=torch.bfloat16)
        times = {("bound", "copy"): n_bytes / rate * 1e6, ("decode", ""): recorded_time(decoded, x[:1], matrices, kind)}
        times |= {
            (kernel, f"{n} rows"): recorded_time(product, x[:n], matrices, kind)
            for n in rows for kernel, product in ways(n).items()
        }  # fmt: skip
        results.rows += [
            {"model": name, "engine": kernel, "variant": "", "what": what, "value": us, "unit": "us"}
            for (kernel, what), us in times.items()
        ]
