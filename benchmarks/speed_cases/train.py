"""Case `train`: time and memory of a LoRA step, llorch's as `llorch lora train` makes it and PEFT's, interleaved.

Both start with a fresh adapter (B = 0) on the same weights and tokens, so their first losses are those of the base:
sides that compute different things cannot be compared. A step is forward, loss, backward, clipping, AdamW.
llorch's combinations are settings of `llorch lora train`, such as `torch,chunk=0` or `torch,weights=packed`.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .decode import FLOATS, Setup, model_path, read_variant, title
from .engines import write_ids
from .models import Models
from .rounds import Engine, Results, Values, interleave_loaded

UNITS = {
    "step": "s", "peak memory": "GB", "of the step": "GB", "first loss": "", "announced peak / peak": "",
}  # fmt: skip
VALUES: Values = {
    "step": lambda answer: answer["seconds"],
    "peak memory": lambda answer: answer["peak_of_all"] / 1e9,
    "of the step": lambda answer: (answer["peak"] - answer["before"]) / 1e9,
    "first loss": lambda answer: answer["value"]["loss"],
}
ANNOUNCED: Values = {"announced peak / peak": lambda answer: answer["value"]["announced"] / answer["peak"]}


def run(
    setup: Setup, results: Results, dtypes: Sequence[str], rows: int, tokens: int, modules: Sequence[str], device: str
) -> None:
    """Measure every type of weights in every dtype."""
    with setup.models() as models, tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.jsonl"
        write_ids(data, rows, tokens)
        settings = {
            "data": str(data), "r": 8, "alpha": 16.0, "target_modules": list(modules), "batch_size": rows,
            "max_length": tokens, "steps": setup.rounds + 1, "device": device,
        }  # fmt: skip
        for kind in setup.kinds:
            for dtype in dtypes:
                results.model = f"{kind}, {dtype}"
                engines = engines_of(setup, models, kind, settings | {"dtype": dtype})
                ran, samples = interleave_loaded(engines, [("step", [], VALUES)], setup.rounds, setup.threads, results)
                results.add(ran, samples, UNITS)


def engines_of(setup: Setup, models: Models | None, kind: str, settings: dict[str, Any]) -> list[Engine]:
    """List llorch's combinations, and PEFT where there is a float folder."""
    engines, path = [], str(model_path(setup, models, kind))
    for text in setup.variants or (["torch"] if kind in FLOATS else ["torch,weights=packed", "torch,weights=decoded"]):
        _, options = read_variant(text)
        actions = (("step", [], {**VALUES, **ANNOUNCED}),) if settings["device"] == "cpu" else ()
        named = title(text, setup)
        engines.append(Engine(kind="Trainer", path=path, options=settings | options, actions=actions, **named))
    folder = models.folder if models is not None else setup.model
    if folder is not None and folder.is_dir():
        engines.append(Engine("PEFT", "PEFT", str(folder), settings, reference=True))
    return engines
