"""Damage a snapshot in many ways and count how often reading detects it.

    python benchmarks/snapshot_damage.py                   1,000 flipped bits and 100 cuts

Each time one bit of one of its files is flipped, or a file is cut; then the snapshot is read as a resumed run reads it.
"""

import tempfile
from pathlib import Path

import click
import numpy as np

from llorch.runtime.errors import FormatError
from llorch.training.snapshot_files import RECORD, TENSORS, read_snapshot
from llorch.training.snapshots import SnapshotStore


def count_detected(folder: Path, *, flips: int, cuts: int, seed: int) -> dict[str, int]:
    """Count detected damage of a new snapshot: flips of a bit in both files, and cuts."""
    rng = np.random.default_rng(seed)
    tensors = {f"optimizer/layers.{layer}.m": rng.normal(size=(8, 5 + layer)).astype(np.float32) for layer in range(6)}
    path = SnapshotStore(folder).save(10, tensors, {"step": 10, "log_offset": 1234})
    counts = {"flips": 0, "cuts": 0}
    for _ in range(flips):
        file, offset = _draw_byte(path, rng)
        flipped = bytearray(file.read_bytes())
        flipped[offset] ^= 1 << int(rng.integers(8))
        counts["flips"] += _is_detected(file, bytes(flipped))
    for _ in range(cuts):
        file, offset = _draw_byte(path, rng)
        counts["cuts"] += _is_detected(file, file.read_bytes()[:offset])
    read_snapshot(path)  # the restored snapshot can be read
    return counts


def _draw_byte(path: Path, rng: np.random.Generator) -> tuple[Path, int]:
    """Draw a byte of the snapshot, each with equal probability."""
    sizes = {path / name: (path / name).stat().st_size for name in (RECORD, TENSORS)}
    offset = int(rng.integers(sum(sizes.values())))
    return (path / RECORD, offset) if offset < sizes[path / RECORD] else (path / TENSORS, offset - sizes[path / RECORD])


def _is_detected(file: Path, damaged: bytes) -> bool:
    """Check that reading refuses the snapshot with the damaged file, and put the file back."""
    original = file.read_bytes()
    file.write_bytes(damaged)
    try:
        read_snapshot(file.parent)
    except FormatError:
        return True
    finally:
        file.write_bytes(original)
    return False


@click.command()
@click.option("--flips", default=1000, show_default=True)
@click.option("--cuts", default=100, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(flips: int, cuts: int, seed: int) -> None:
    """Print the amount of damage that was detected; exit code 1 if not all was."""
    with tempfile.TemporaryDirectory() as folder:
        counts = count_detected(Path(folder), flips=flips, cuts=cuts, seed=seed)
    click.echo(f"{counts['flips']} of {flips} flipped bits and {counts['cuts']} of {cuts} cuts noticed")
    raise click.exceptions.Exit(counts != {"flips": flips, "cuts": cuts})


if __name__ == "__main__":
    main()
