"""Reproduction program for a report: it writes a model that an engine gets wrong, a control model, and runs both.

It needs only the engine's environment, not llorch. It is run there, and its output is part of the report. A report
has no program if the program does not show the bug.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import gguf
import numpy as np

from benchmarks.atlas.catalogue import AtlasEngine
from benchmarks.atlas.inputs import FAMILIES, IDS, NO_WINDOW, SEED, AtlasInput, write_input
from benchmarks.atlas.runs import run_program
from llorch.engines import open_engine
from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.files.tensor_names import inventory

N_SHOWN = 4  # logits of the last token
_CLOSE, _APART = 2e-4, 2e-3  # expected and actual logits are rounded to four digits
_IDLE = {  # keys that do not change the result
    "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "pad_token_id",
    "output_router_logits", "pretraining_tp", "router_aux_loss_coef", "torch_dtype", "transformers_version",
    "use_cache",
}  # fmt: skip
_NEUTRAL = {**NO_WINDOW, "decoder_sparse_step": 1, "mlp_only_layers": []}  # same result as without these keys
_WIDTH = 119
_LINE = re.compile(r"^\S+ expected \[(.*)\] got \[(.*)\]$", re.MULTILINE)


@dataclass(frozen=True)
class ProgramOutput:
    """Program and the lines that it printed in the engine's environment."""

    program: str
    printed: str


@dataclass(frozen=True)
class _Case:
    """Model of a program: keys and tensors of its file, and its float64 reference."""

    name: str
    keys: Mapping[str, Any]
    fixed: Mapping[str, Sequence[float]]  # tensors that are not random
    expected: Sequence[float]
    config: ModelConfig


def run_repro_script(
    case: AtlasInput, control: AtlasInput, engine: AtlasEngine, python: Path, home: Path
) -> ProgramOutput | None:
    """Write and run a program that shows a bug; None without a program, or if it does not show the bug.

    Args:
        case: An input that the engine gets wrong.
        control: A control input that the engine gets right.
        engine: The engine with the bug.
        python: The interpreter of its environment.
        home: A folder with `inputs`; the program runs in `programs`.

    Raises:
        OSError: The files of an input cannot be written.
    """
    if not engine.snippet or case.family not in FAMILIES:
        return None
    source = program(case, control, engine, home)
    output = run_program([str(python), "-c", source], home / "programs" / f"{engine.script}-{case.name}")
    lines = [*_LINE.finditer(output)]
    gaps = [np.abs(np.subtract(*(np.fromstring(x, sep=",") for x in line.groups()))).max() for line in lines]
    if len(gaps) == 2 and gaps[0] > _APART and gaps[1] < _CLOSE:
        return ProgramOutput(source, "\n".join(line.group() for line in lines))
    return None


def program(wrong: AtlasInput, control: AtlasInput, engine: AtlasEngine, home: Path) -> str:
    """Write a Python program that runs both models and prints expected and actual logits."""
    ids = [token for part in wrong.parts for token in part]
    cases = [(_describe_file if wrong.gguf else _describe_folder)(i, ids, home / "inputs") for i in (wrong, control)]
    common = {key: value for key, value in cases[0].keys.items() if cases[1].keys.get(key, ...) == value}
    shapes_by_case = [_tensor_shapes(case.config, pairs=wrong.gguf) for case in cases]
    shapes = shapes_by_case[0] | shapes_by_case[1]
    case_data = [
        (case.name, {key: value for key, value in case.keys.items() if key not in common},
         tuple(name.removeprefix("{0}.") for name in shapes if name not in names), case.fixed, case.expected)
        for case, names in zip(cases, shapes_by_case, strict=True)
    ]  # fmt: skip
    common = {key: value for key, value in common.items() if _NEUTRAL.get(key, ...) != value}
    config = cases[0].config
    return (_FOR_FILES if wrong.gguf else _FOR_FOLDERS).format(
        snippet=engine.snippet.strip(), seed=SEED, low=IDS[0], high=IDS[1], n_ids=len(ids), common=_short(common),
        cases=_short(case_data), shapes=_short(_by_shape(shapes)), n_layers=config.n_layers,
        size=f"{config.n_layers}, {config.experts.n_experts if config.experts else 1}", n_shown=N_SHOWN,
        family=config.family, family_upper=config.family.upper(), vocab_size=config.vocab_size,
    )  # fmt: skip


_DRAWN = """COMMON = {common}
CASES = {cases}
SHAPES = {shapes}
SHAPES = {{k.format(f"model.layers.{{i}}", e): s for s in SHAPES for k in SHAPES[s] for i, e in np.ndindex({size})}}
for name, own, absent, fixed, expected in CASES:
    draw, names = np.random.default_rng(0).standard_normal, [k for k in sorted(SHAPES) if not k.endswith(absent)]
    made = {{k: np.float32(("norm" in k) + (0.05 + 0.15 * ("norm" in k)) * draw(SHAPES[k])) for k in names}} | fixed
"""
_PRINTED = """
    print(name, "expected", expected, "got", [round(float(x), 4) for x in logits(name, IDS)[-1][:{n_shown}]])
"""
_FOR_FOLDERS = f"""import json, pathlib, numpy as np, safetensors.numpy as st
{{snippet}}
IDS = np.random.default_rng({{seed}}).integers({{low}}, {{high}}, {{n_ids}}).tolist()
{_DRAWN}    pathlib.Path(name).mkdir(exist_ok=True)
    pathlib.Path(name, "config.json").write_text(json.dumps(COMMON | own))
    st.save_file(made, f"{{{{name}}}}/model.safetensors", metadata={{{{"format": "pt"}}}}){_PRINTED}"""
_FOR_FILES = f"""import gguf, numpy as np
{{snippet}}
IDS = np.random.default_rng({{seed}}).integers({{low}}, {{high}}, {{n_ids}}).tolist()
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.{{family_upper}}, {{n_layers}})
{_DRAWN}    file = gguf.GGUFWriter(name, "{{family}}"); file.add_token_list([str(i) for i in range({{vocab_size}})])
    for k, x in (COMMON | own).items(): file.add_key_value("{{family}}." + k, x, gguf.GGUFValueType.get_type(x))
    turned = lambda x: np.float32(x.swapaxes(1, 2).reshape(-1, *x.shape[3:]) if np.ndim(x) > 2 else x)  # rows in pairs
    for k, x in made.items(): file.add_tensor(NAMES.get_name(k, (".weight", ".bias")), turned(x))
    file.write_header_to_file(); file.write_kv_data_to_file(); file.write_tensors_to_file(); file.close(){_PRINTED}"""


def _describe_folder(case: AtlasInput, ids: Sequence[int], inputs: Path) -> _Case:
    """Write the input as a Hugging Face folder; describe it by the relevant keys of its config.json."""
    folder = write_input(case, inputs)
    config = json.loads((folder / "config.json").read_text())
    keys = {key: setting for key, setting in config.items() if key not in _IDLE}
    return _Case(case.name, keys, {}, _expected(folder, ids), open_weights(folder).config)


def _describe_file(case: AtlasInput, ids: Sequence[int], inputs: Path) -> _Case:
    """Write the input as a GGUF file; describe it by the keys of its architecture and its RoPE factors."""
    file = write_input(case, inputs)
    reader = gguf.GGUFReader(file)
    prefix = f"{reader.fields['general.architecture'].contents()}."
    keys = {k.removeprefix(prefix): field.contents() for k, field in reader.fields.items() if k.startswith(prefix)}
    keys = {k: float(f"{number:.6g}") if isinstance(number, float) else number for k, number in keys.items()}
    fixed = {t.name: _rounded_list(t.data) for t in reader.tensors if t.name == "rope_freqs.weight"}
    expected = _expected(write_input(replace(case, gguf=False), inputs), ids)
    return _Case(case.name, keys, fixed, expected, open_weights(file).config)


def _expected(folder: Path, ids: Sequence[int]) -> list[float]:
    """Return the first `N_SHOWN` logits of the last token, from transformers in float64, with 4 decimals."""
    with open_engine("transformers", folder, dtype="float64") as engine:
        return _rounded_list(engine.logits(ids)[-1][:N_SHOWN])


def _rounded_list(numbers: np.ndarray) -> list[float]:
    return [round(float(number), 4) for number in numbers]


def _tensor_shapes(config: ModelConfig, *, pairs: bool) -> dict[str, tuple[int, ...]]:
    """Map names of tensors to shapes; in a name {0} is a layer, {1} the number of an expert.

    For a GGUF file with interleaved rows of q and k, these are (heads, 2, half a head, in), for a transposition.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in inventory(config).values():
        name = re.sub(r"^model\.layers\.\d+\.", "{0}.", weight.huggingface.replace("{e}", "{1}"))
        rows, *other_axes = weight.shape[1:] if "{1}" in name else weight.shape
        heads = weight.interleaved_heads if pairs else 0
        shapes[name] = (heads, 2, rows // heads // 2, *other_axes) if heads else (rows, *other_axes)
    return shapes


def _by_shape(shapes: Mapping[str, tuple[int, ...]]) -> dict[tuple[int, ...], list[str]]:
    return {shape: [name for name in shapes if shapes[name] == shape] for shape in shapes.values()}


def _short(value: object) -> str:
    """Return the `repr` of a value, broken into lines of at most `_WIDTH` characters."""
    return "\n ".join(wrap(repr(value), _WIDTH, break_long_words=False, break_on_hyphens=False))
