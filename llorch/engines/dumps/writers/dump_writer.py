"""Write tensors of an engine for `llorch diagnose`. Copy this file into your engine: it needs only NumPy.

with DumpWriter("dump", engine="mine", dtype="float32") as dump:
    dump.begin([9, 4, 7])  # once for every call of the forward: token ids, and optionally the first position
    dump.add("q_rot", q, layer=0)  # any name, any number of tensors
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


class DumpWriter:
    """Writer of a folder with one file of raw little-endian arrays, and index.jsonl with a line for each array."""

    def __init__(self, folder: str | Path, *, engine: str = "", dtype: str = "", kv_cache: str = "",
                 activations: str = "", flash_attention: bool = False,
                 weights: Mapping[str, str] | None = None) -> None:  # fmt: skip
        """Start a new dump and replace an existing one; `weights`: SHA-256 of the engine's float32 weights, by name."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._data = (Path(folder) / "data.bin").open("wb")
        self._index = (Path(folder) / "index.jsonl").open("w", encoding="utf-8", newline="\n")
        self._n_passes = 0
        self._line(llorch_dump=1, engine=engine, dtype=dtype, kv_cache=kv_cache, activations=activations,
                   flash_attention=flash_attention, weights=dict(weights or {}))  # fmt: skip

    def begin(self, ids: Iterable[Any], first_position: int = 0, attention_mask: Any = None) -> None:
        """Start a pass: the tokens of one call of the engine's forward; of a batch, a list for each row, and a mask."""
        mask = {} if attention_mask is None else {"attention_mask": (np.asarray(attention_mask) + 0).tolist()}
        rows = [np.asarray(row).tolist() for row in ids]
        self._line(**{"pass": self._n_passes}, ids=rows, first_position=first_position, **mask)
        self._n_passes += 1

    def add(self, name: str, array: Any, *, layer: int | None = None, tokens: Iterable[int] | None = None,
            axes: str = "", dtype: str = "") -> None:  # fmt: skip
        """Write an array; `tokens`: indices in the pass, `axes`: "seq heads head_dim", `dtype`: bfloat16 for uint16."""
        array = np.ascontiguousarray(array, np.asarray(array).dtype.newbyteorder("<"))
        keys = {"layer": layer, "tokens": tokens if tokens is None else [int(i) for i in tokens], "axes": axes}
        offset = self._data.tell()
        self._data.write(array.reshape(-1).view(np.uint8).data)
        self._data.flush()  # before the index, so that even after a crash its lines name complete arrays
        self._line(name=name, dtype=dtype or array.dtype.name, shape=array.shape, file="data.bin", offset=offset,
                   **{key: entry for key, entry in keys.items() if entry not in (None, "")})  # fmt: skip

    def _line(self, **values: object) -> None:
        self._index.write(json.dumps(values) + "\n")
        self._index.flush()

    def __enter__(self) -> "DumpWriter":
        """Return the writer."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close both files, even if closing one of them fails."""
        with self._data, self._index:
            pass
