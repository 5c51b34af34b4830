"""A family is a file of `llorch/families`: no code outside that package asks which family a model is of."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import families, tiny_models

from llorch.families.table import FAMILIES

ROOT = Path(__file__).parents[2]
PACKAGE = "llorch/families/"
NAMES = {
    name
    for key, row in FAMILIES.items()
    for name in (
        *(key, f"{key}_text", row.gguf, row.multimodal_type),
        *(f"{row.classes}{suffix}" for suffix in ("", "ForCausalLM", "Attention")),
    )
    if name
}
# Words that are names of families, too: of vocabularies and of pre-tokenizers of llama.cpp; facts of architectures.
WORDS = {
    f"llorch/files/tokenizer/{module}.py": set(words.split())
    for module, words in {
        "export_gguf": "llama", "gguf_vocabulary": "llama", "export_huggingface": "qwen2 qwen35",
        "byte_level": "qwen2 qwen35 llama4", "pipeline": "qwen2 qwen35 llama4",
    }.items()
} | {
    "llorch/judging/source/forms.py": set("llama llama4 mistral3 qwen35 qwen35moe qwen3next smollm3".split()),
}  # fmt: skip


def families_in_conditions(source: str) -> set[str]:
    """Find the families that conditions of a module name: comparisons, cases, look-ups, and tables by family."""
    parts = (part for node in ast.walk(ast.parse(source)) for part in conditions(node))
    nodes = (node for part in parts for node in ast.walk(part))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and node.value in NAMES}


def conditions(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare():
            yield from (node.left, *node.comparators)
        case ast.match_case(pattern=pattern):
            yield pattern
        case ast.Call(func=ast.Attribute(attr="startswith" | "endswith" | "get"), args=args):
            yield from args
        case ast.Subscript(slice=index):
            yield index
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            yield from looked_up(value)


def looked_up(value: ast.expr) -> Iterator[ast.expr]:
    """Yield the parts of a collection by which a condition may find a family in it."""
    match value:
        case ast.Tuple(elts=parts) | ast.Set(elts=parts) | ast.List(elts=parts):
            yield from parts
        case ast.Dict(keys=keys):
            yield from (key for key in keys if key is not None)


@pytest.mark.parametrize(
    "line",
    [
        'if config.family == "smollm3": ...', 'ok = family.classes in ("SmolLM3", "Ministral3")',
        'match kind:\n    case "llama4" | "other": ...', 'NO_BIAS = ("qwen2", "mistral")',
        'WITHOUT_EYES: Mapping[str, str] = {"qwen2_5_vl": "other"}',
        'bias = {"qwen2_moe": 1}["qwen2_moe"]', 'key = table.get("qwen3_next")', 'if kind.startswith("qwen3_5"): ...',
    ],
)  # fmt: skip
def test_a_condition_that_names_a_family_is_found(line: str):
    assert families_in_conditions(line)


def test_data_that_names_a_family_is_no_condition():
    assert families_in_conditions('shape = make(family="llama")\nraise Refused("qwen2")') == set()


def test_no_condition_outside_the_table_names_a_family():
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "llorch").rglob("*.py")}
    modules = {name: path for name, path in files.items() if not name.startswith(PACKAGE)}
    found = {name: families_in_conditions(path.read_text(encoding="utf-8")) for name, path in modules.items()}
    assert {name: families for name, families in found.items() if families} == WORDS


def test_every_family_has_a_row():
    assert families.FAMILIES.keys() | tiny_models.FAMILIES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("column", ["gradients", "engine_cases"])
def test_every_family_has_a_model_in_each_column(column: str):
    assert {family for family, _ in families.labelled(column).values()} == families.FAMILIES.keys()
