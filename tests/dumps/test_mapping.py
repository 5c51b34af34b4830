"""The mapping file: what it says, and what is refused of it."""

from pathlib import Path

import pytest

from llorch.dumps.layout import Layout
from llorch.dumps.mapping import mapping_of, read_mapping
from llorch.dumps.stage_dump import Tokens
from llorch.errors import FormatError

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

[run]
ids = [[1, 2], [3]]
first_position = 7
dtype = "bfloat16"
flash_attention = true
"""


def test_everything_that_a_file_says_is_read(tmp_path: Path):
    path = tmp_path / "names.toml"
    path.write_text(TEXT)
    mapping = read_mapping(path)
    assert mapping.find("blk.11.rot_q", None) == ("blk.{i}.rot_q", 11)
    assert mapping.find("h2+qkv", None) == ("h{i+1}+qkv", 1)
    assert mapping.find("first", None) == ("first", 0)
    assert mapping.find("scratch", 3) == ("scratch", 3)
    assert mapping.find("blk.x.rot_q", None) is None
    assert mapping.names["scratch"] == ()
    assert mapping.layout("q_rope", "blk.{i}.rot_q") == Layout(("batch", "heads", "seq", "head_dim"), True, 0.25)
    assert mapping.layout("q_proj", "h{i+1}+qkv") == Layout(("width", "seq"), fused="groups")
    assert mapping.layout("attn_scores", "") == Layout(masked=False)
    assert mapping.layout("k_rope", "blk.{i}.rot_k") == Layout()
    assert mapping.passes == (Tokens((1, 2), 7), Tokens((3,), 9))
    assert mapping.features == {"dtype": "bfloat16", "flash_attention": True}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[names", "Malformed: expected TOML, got "),
        ("[name]", "Unexpected: name: expected one of names, layout, run; did you mean 'names'?"),
        ("names = 3", "Malformed: names: expected an object, got 3"),
        ('[names]\na = "q_ropes"', "a: expected a stage (see llorch.stages), got 'q_ropes'; did you mean 'q_rope'?"),
        ("[names]\na = 3", "Malformed: a: expected projections of q_proj, k_proj, v_proj, ffn_gate, ffn_up, got 3"),
        ('[names]\na = []', "Malformed: a: expected projections of "),
        ('[names]\na = ["q_proj", "q_proj"]', "Malformed: a: expected projections of "),
        ('[names]\na = ["q_proj", "q_rope"]', "got 'q_rope'; did you mean 'q_proj'?"),
        ('[names]\n"{i}.{i}" = "q_rope"', "Malformed: {i}.{i}: expected a pattern with {i} once at most, got 'q_rope'"),
        ("[layout.q_rop]", "Unexpected: layout.q_rop: expected one of "),
        ("[layout]\nq_rope = 1", "Malformed: q_rope: expected an object, got 1"),
        ("[layout.q_rope]\naxis = ''", "Unexpected: layout.q_rope.axis: expected one of axes, transposed, permuted, "),
        ("[layout.q_rope]\naxes = 3", "Malformed: axes: expected a string, got 3"),
        ("[layout.q_rope]\naxes = 'seq'\ntransposed = true", "Inconsistent: transposed: expected either axes or "),
        ("[layout.q_rope]\npermuted = 'pairs'", "Unsupported: permuted: expected '' or 'interleaved', got 'pairs'"),
        ("[layout.q_rope]\nfused = 'x'", "Unsupported: fused: expected 'stacked' or 'groups' or 'alternating'"),
        ("[layout.q_rope]\ntimes = 0", "OutOfRange: times: expected a factor other than 0, got 0.0"),
        ("[layout.q_rope]\ntimes = nan", "OutOfRange: times: expected a finite number, got nan"),
        ("[run]\nid = [1]", "Unexpected: run.id: expected one of ids, "),
        ("[run]\nids = 3", "Malformed: ids: expected token ids, or a list of them for each pass, got 3"),
        ("[run]\nids = [1, -2]", "Malformed: ids: expected token ids"),
        ("[run]\nids = [[1], []]", "Malformed: ids: expected token ids"),
        ("[run]\nids = [true]", "Malformed: ids: expected token ids"),
        ("[run]\nfirst_position = -1", "OutOfRange: first_position: expected at least 0, got -1"),
        ("[run]\ndtype = 16", "Malformed: dtype: expected a string, got 16"),
        ("a" * (1 << 20) + "=1", "TooLarge: expected a mapping of at most 1 MiB, got 1048578 bytes"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_file_and_key(tmp_path: Path, text: str, said: str):
    path = tmp_path / "names.toml"
    path.write_text(text)
    with pytest.raises(FormatError) as error:
        read_mapping(path)
    assert str(error.value).startswith(f"{path}: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_layouts_are_those_of_stages_or_of_names_in_the_file():
    assert mapping_of({"names": {"a": "kq"}, "layout": {"a": {}, "kq": {"transposed": True}}}).layouts == {
        "a": Layout(), "kq": Layout(("ctx", "seq", "heads")),
    }  # fmt: skip
