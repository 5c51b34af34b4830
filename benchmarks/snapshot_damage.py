"""Damage a snapshot in many ways and count how often that is noticed when it is read.

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


def noticed(folder: Path, *, flips: int, cuts: int, seed: int) -> dict[str, int]:
    """Count the flips of a bit, in both files, and the cuts of a new snapshot that were noticed."""
    rng = np.random.default_rng(seed)
    tensors = {f"optimizer/layers.{i}.m": rng.normal(size=(8, 5 + i)).astype(np.float32) for i in range(6)}
    path = SnapshotStore(folder).save(10, tensors, {"step": 10, "log_offset": 1234})
    found = {"flips": 0, "cuts": 0}
    for _ in range(flips):
        file, at = _place(path, rng)
        data = bytearray(file.read_bytes())
        data[at] ^= 1 << int(rng.integers(8))
        found["flips"] += _is_noticed(file, bytes(data))
    for _ in range(cuts):
        file, at = _place(path, rng)
        found["cuts"] += _is_noticed(file, file.read_bytes()[:at])
    read_snapshot(path)  # undamaged it is read
    return found


def _place(path: Path, rng: np.random.Generator) -> tuple[Path, int]:
    """Draw a byte of the snapshot, each with equal probability."""
    sizes = {path / name: (path / name).stat().st_size for name in (RECORD, TENSORS)}
    at = int(rng.integers(sum(sizes.values())))
    return (path / RECORD, at) if at < sizes[path / RECORD] else (path / TENSORS, at - sizes[path / RECORD])


def _is_noticed(file: Path, damaged: bytes) -> bool:
    """Check that reading refuses the snapshot with the damaged file, and put the file back."""
    sound = file.read_bytes()
    file.write_bytes(damaged)
    try:
        read_snapshot(file.parent)
    except FormatError:
        return True
    finally:
        file.write_bytes(sound)
    return False


@click.command()
@click.option("--flips", default=1000, show_default=True)
@click.option("--cuts", default=100, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(flips: int, cuts: int, seed: int) -> None:
    """Print how much damage was noticed; exit code 1 when not all was."""
    with tempfile.TemporaryDirectory() as folder:
        found = noticed(Path(folder), flips=flips, cuts=cuts, seed=seed)
    click.echo(f"{found['flips']} of {flips} flipped bits and {found['cuts']} of {cuts} cuts noticed")
    raise click.exceptions.Exit(found != {"flips": flips, "cuts": cuts})


if __name__ == "__main__":
    main()
