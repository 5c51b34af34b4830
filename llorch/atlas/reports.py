"""A report for the maintainers of an engine: what it computes, what is expected, and a program that shows both."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from safetensors import safe_open

from llorch.atlas.catalogue import Engine
from llorch.atlas.inputs import FAMILIES, IDS, SEED, Input, write_input
from llorch.atlas.verdicts import Verdict
from llorch.verify.witnesses import open_producer

N_SHOWN = 4  # logits of the last token
_IDLE = {  # keys that no engine needs to read
    "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "pad_token_id",
    "output_router_logits", "pretraining_tp", "router_aux_loss_coef", "torch_dtype", "transformers_version",
    "use_cache",
}  # fmt: skip
_WIDTH = 118
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def report(title: str, own: Sequence[Verdict], engine: Engine, home: Path) -> str:
    """One report, as Markdown.

    Args:
        title: Of the bug.
        own: Its verdicts, on one input or more.
        engine: Which has it.
        home: With the inputs that were written.
    """
    first = own[0]
    assert first.judged
    assert first.agreed
    assert first.confirmed_by
    said = [
        f"# {title}",
        f"{first.engine} {first.version}, from the package registry, float32 on a CPU.",
        f"On these models its logits are not those of transformers: "
        f"{', '.join(dict.fromkeys(f'`{each.input.name}` ({each.judged.error:.0e})' for each in own if each.judged))}. "
        "In brackets: |theirs - transformers in float64| / |transformers in float64|.",
        f"First stage that is off: `{first.judged.key}`. {' '.join(first.judged.findings)}",
        f"With {first.correction} it agrees: {first.agreed.error:.0e}, which is rounding.",
    ]
    if engine.snippet and first.input.family in FAMILIES and not first.input.gguf:
        said.append("Logits of the last token, beside those of transformers in float64, on both models:")
        said.append(f"```python\n{program(first.input, first.confirmed_by, engine, home)}```")
    else:
        said.append(f"`llorch atlas {first.engine}` makes these files and repeats this.")
    return "\n\n".join(said) + "\n"


def program(this: Input, sister: Input, engine: Engine, home: Path) -> str:
    """A program for the environment of the engine that needs nothing of llorch: both models, expected and got."""
    folders = [write_input(one, home / "inputs") for one in (this, sister)]
    configs: list[dict[str, Any]] = [json.loads((folder / "config.json").read_text()) for folder in folders]
    configs = [{key: value for key, value in config.items() if key not in _IDLE} for config in configs]
    common = {key: value for key, value in configs[0].items() if configs[1].get(key, ...) == value}
    ids = [token for part in this.parts for token in part]
    cases = [
        (one.name, {key: value for key, value in config.items() if key not in common}, _expected(folder, ids))
        for one, config, folder in zip((this, sister), configs, folders, strict=True)
    ]
    return _PROGRAM.format(
        snippet=engine.snippet.strip(), seed=SEED, low=IDS[0], high=IDS[1], n_ids=len(ids), common=_short(common),
        cases=_short(cases), shapes=_shapes(folders[0]), n_shown=N_SHOWN,
    )  # fmt: skip


_PROGRAM = """import json, pathlib, numpy as np
from safetensors.numpy import save_file
{snippet}
IDS = np.random.default_rng({seed}).integers({low}, {high}, {n_ids}).tolist()
COMMON = {common}
CASES = {cases}
SHAPES = {shapes}
for name, own, expected in CASES:
    draw, folder = np.random.default_rng(0).standard_normal, pathlib.Path(name)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(COMMON | own))
    made = {{k: np.float32(("norm" in k) + (0.05 + 0.15 * ("norm" in k)) * draw(SHAPES[k])) for k in sorted(SHAPES)}}
    save_file(made, folder / "model.safetensors", metadata={{"format": "pt"}})
    print(name, "expected", expected, "got", [round(float(x), 4) for x in logits(name, IDS)[-1][:{n_shown}]])
"""


def _expected(folder: Path, ids: Sequence[int]) -> list[float]:
    with open_producer("transformers", folder, dtype="float64") as engine:
        return np.round(engine.logits(ids)[-1][:N_SHOWN], 4).tolist()


def _shapes(folder: Path) -> str:
    """A Python expression; layers that are alike stand there once."""
    with safe_open(folder / "model.safetensors", "numpy") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    for name in shapes:
        if of := _LAYER.match(name):
            layers.setdefault(int(of[1]), {})[name[of.end() :]] = shapes[name]
    if any(layers[0] != layer for layer in layers.values()):
        return _short(shapes)
    outside = {name: shape for name, shape in shapes.items() if not _LAYER.match(name)}
    each = f'f"model.layers.{{i}}.{{key}}": shape for i in range({len(layers)}) for key, shape in LAYER.items()'
    return f"{_short(outside)}\nLAYER = {_short(layers[0])}\nSHAPES |= {{{each}}}"


def _short(value: object) -> str:
    return "\n ".join(wrap(repr(value), _WIDTH, break_long_words=False, break_on_hyphens=False))
