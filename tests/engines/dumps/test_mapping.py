"""The mapping file: what it says, and what is refused of it."""

from pathlib import Path

import pytest
from helpers.refusals import refuses

from llorch.engines.dumps.layout import DumpLayout
from llorch.engines.dumps.mapping import mapping_of, read_mapping
from llorch.engines.dumps.stage_dump import INT8_CACHES
from llorch.engines.dumps.widths import Share
from llorch.stages.stage_ref import Tokens

TEXT = """
[names]
"blk.{i}.rot_q" = "q_rope"
"h{i+1}+qkv" = ["q_proj", "k_proj", "v_proj"]
"first" = "l0.block_out"
"scratch" = ""

[layout.q_rope]
axes = "batch heads seq head_dim"
permuted = "interleaved"
times = 0.25

[layout."h{i+1}+qkv"]
fused = "groups"
transposed = true

[layout.attn_scores]
masked = false

[layout.delta_out]
value_heads = "tiled"

[run]
ids = [[1, 2], [3]]
first_position = 7
dtype = "bf16"
kv_cache = "int8-head"
flash_attention = true
rank = "1/4"
"""


def test_every_mapping_key_is_read(tmp_path: Path):
    path = tmp_path / "names.toml"
    path.write_text(TEXT)
    mapping = read_mapping(path)
    assert mapping.find("blk.11.rot_q", None) == ("blk.{i}.rot_q", 11)
    assert mapping.find("h2+qkv", None) == ("h{i+1}+qkv", 1)
    assert mapping.find("first", None) == ("first", 0)
    assert mapping.find("scratch", 3) == ("scratch", 3)
    assert mapping.find("blk.x.rot_q", None) is None
    assert mapping.names["scratch"] == ()
    assert mapping.layout("q_rope", "blk.{i}.rot_q") == DumpLayout(("batch", "heads", "seq", "head_dim"), True, 0.25)
    assert mapping.layout("q_proj", "h{i+1}+qkv") == DumpLayout(("width", "seq"), fused="groups")
    assert mapping.layout("attn_scores", "") == DumpLayout(masked=False)
    assert mapping.layout("delta_out", "") == DumpLayout(tiled=True)
    assert mapping.layout("k_rope", "blk.{i}.rot_k") == DumpLayout()
    assert mapping.passes == (Tokens((1, 2), 7), Tokens((3,), 9))
    assert mapping.features == {"dtype": "bfloat16", "kv_cache": "int8-head", "flash_attention": True}
    assert mapping.share == Share(1, 4)


PROJECTIONS = "q_proj, k_proj, v_proj, ffn_gate, ffn_up"
RUN_KEYS = ("ids", "first_position", "rank", "engine", "dtype", "kv_cache", "activations", "flash_attention")
LAYOUT_KEYS = ("axes", "transposed", "permuted", "value_heads", "times", "masked", "fused")
WRONG: dict[str, tuple[str, str, tuple[object, ...], tuple[object, ...]]] = {  # text, code, facts, those behind "got"
    "no TOML": ("[names", "Malformed", ("TOML",), ()),
    "unknown section": ("[name]", "Unexpected", ("name:", "names, layout, run", "'names'"), ()),
    "names no section": ("names = 3", "Malformed", ("names:", "object"), (3,)),
    "unknown stage": ('[names]\na = "q_ropes"', "Malformed", ("a:", "llorch.stages.table"), ("'q_ropes'", "'q_rope'")),
    "stage a number": ("[names]\na = 3", "Malformed", ("a:", PROJECTIONS), (3,)),
    "no projections": ("[names]\na = []", "Malformed", ("a:", PROJECTIONS), ("[]",)),
    "projection twice": ('[names]\na = ["q_proj", "q_proj"]', "Malformed", ("a:", PROJECTIONS), ("'q_proj'",)),
    "no projection": ('[names]\na = ["q_proj", "q_rope"]', "Malformed", ("a:", PROJECTIONS), ("'q_rope'", "'q_proj'")),
    "layer twice": ('[names]\n"{i}.{i}" = "q_rope"', "Malformed", ("{i}.{i}:", "{i}"), ("'q_rope'",)),
    "layout of no stage": ("[layout.q_rop]", "Unexpected", ("layout.q_rop:", "embed, attn_norm"), ()),
    "layout no section": ("[layout]\nq_rope = 1", "Malformed", ("q_rope:", "object"), (1,)),
    "unknown key of a layout": (
        "[layout.q_rope]\naxis = ''", "Unexpected", ("layout.q_rope.axis:", *LAYOUT_KEYS, "'axes'"), ()
    ),
    "axes a number": ("[layout.q_rope]\naxes = 3", "Malformed", ("axes:", "string"), (3,)),
    "axes and transposed": (
        "[layout.q_rope]\naxes = 'seq'\ntransposed = true", "Inconsistent", ("transposed:", "axes"), ("('seq',)",)
    ),
    "unknown pairs": (
        "[layout.q_rope]\npermuted = 'pairs'", "Unsupported", ("permuted:", "'interleaved'"), ("'pairs'",)
    ),
    "unknown order of heads": (
        "[layout.z_in]\nvalue_heads = 'x'", "Unsupported", ("value_heads:", "'tiled'"), ("'x'",)
    ),
    "unknown fusion": (
        "[layout.q_rope]\nfused = 'x'", "Unsupported", ("fused:", "'stacked'", "'groups'", "'alternating'"), ("'x'",)
    ),
    "factor 0": ("[layout.q_rope]\ntimes = 0", "OutOfRange", ("times:", "factor"), ("0.0",)),
    "factor nan": ("[layout.q_rope]\ntimes = nan", "OutOfRange", ("times:", "finite"), ("nan",)),
    "unknown key of the run": ("[run]\nid = [1]", "Unexpected", ("run.id:", *RUN_KEYS, "'ids'"), ()),
    "ids a number": ("[run]\nids = 3", "Malformed", ("ids:", "token ids"), (3,)),
    "negative id": ("[run]\nids = [1, -2]", "Malformed", ("ids:", "token ids"), ("[1, -2]",)),
    "pass of no token": ("[run]\nids = [[1], []]", "Malformed", ("ids:", "token ids"), ("[[1], []]",)),
    "id a bool": ("[run]\nids = [true]", "Malformed", ("ids:", "token ids"), ("[True]",)),
    "negative position": ("[run]\nfirst_position = -1", "OutOfRange", ("first_position:", 0), (-1,)),
    "dtype a number": ("[run]\ndtype = 16", "Malformed", ("dtype:", "string"), (16,)),
    "unknown cache": ("[run]\nkv_cache = 'int4'", "Unsupported", ("kv_cache:", *INT8_CACHES), ("'int4'",)),
    "rank without a number of ranks": ("[run]\nrank = '1'", "Malformed", ("rank:", '"1/4"'), ("'1'",)),
    "rank after the last": ("[run]\nrank = '4/4'", "Malformed", ("rank:", '"1/4"'), ("'4/4'",)),
    "too large": ("a" * (1 << 20) + "=1", "TooLarge", (1 << 20,), ()),
}  # fmt: skip


def test_int8_cache_without_a_scope_has_a_scale_for_each_row():
    assert mapping_of({"run": {"kv_cache": "int8"}}).features == {"kv_cache": "int8-row"}


@pytest.mark.parametrize(("text", "code", "facts", "actual"), WRONG.values(), ids=WRONG)
def test_error_names_file_and_key(
    tmp_path: Path, text: str, code: str, facts: tuple[object, ...], actual: tuple[object, ...]
):
    path = tmp_path / "names.toml"
    path.write_text(text)
    with refuses(code, *facts, got=actual) as caught:
        read_mapping(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_layouts_are_keyed_by_stage_or_dump_name():
    assert mapping_of({"names": {"a": "kq"}, "layout": {"a": {}, "kq": {"transposed": True}}}).layouts == {
        "a": DumpLayout(), "kq": DumpLayout(("ctx", "seq", "heads")),
    }  # fmt: skip
