"""The writers, compiled and run: what they write is read back."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import llorch
import llorch.engines.dumps.writers
from llorch.engines.dumps.index import open_raw
from llorch.engines.dumps.stage_dump import Features
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.model.cache import KVCache
from llorch.stages.comparison import compare
from llorch.stages.stage_ref import Tokens

WRITERS = sorted(Path(llorch.engines.dumps.writers.__file__).parent.glob("*[!_].*"))

PYTHON = """
import numpy as np
from dump_writer import DumpWriter
with DumpWriter("dump", engine="mine", dtype="float32") as dump:
    for n_pass, first in enumerate((0, 2)):
        dump.begin([9, 4 + n_pass], first)
        dump.add("q_rot", np.arange(12, dtype=np.float32).reshape(2, 3, 2) / 8 + n_pass, layer=1)
        dump.add("logits", np.array([1.5, -2, 3], np.float16), tokens=[1])
"""
C = r"""
#include "llorch_dump.h"
int main(void) {
    llorch_dump dump = llorch_dump_open("dump", "\"engine\": \"mine\", \"dtype\": \"float32\"");
    float q[12];
    const unsigned short logits[] = {0x3e00, 0xc000, 0x4200};
    const long shape[] = {2, 3, 2}, vocab[] = {3};
    for (int n_pass = 0; n_pass < 2; n_pass++) {
        const int ids[] = {9, 4 + n_pass};
        for (int i = 0; i < 12; i++) q[i] = i / 8.0f + n_pass;
        llorch_dump_begin(&dump, ids, 2, 2 * n_pass);
        llorch_dump_add(&dump, "q_rot", 1, "f32", q, 3, shape, NULL);
        llorch_dump_add(&dump, "logits", -1, "f16", logits, 1, vocab, "\"tokens\": [1]");
    }
    llorch_dump_close(&dump);
    return 0;
}
"""
RUST = """
mod llorch_dump;
fn main() -> std::io::Result<()> {
    let mut dump = llorch_dump::Dump::open("dump", r#""engine": "mine", "dtype": "float32""#)?;
    for n_pass in 0..2 {
        let q: Vec<f32> = (0..12).map(|i| i as f32 / 8.0 + n_pass as f32).collect();
        dump.begin(&[9, 4 + n_pass], 2 * n_pass as usize)?;
        dump.add("q_rot", Some(1), &q, &[2, 3, 2], "")?;
        dump.add_bytes("logits", None, "f16", &[0, 0x3e, 0, 0xc0, 0, 0x42], &[3], r#""tokens": [1]"#)?;
    }
    Ok(())
}
"""
STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic"]
# The source, and what makes an executable `program` of it.
ENGINES = {
    "engine.py": (PYTHON, []),
    "engine.c": (C, ["gcc", "-std=c99", *STRICT, "engine.c", "-o", "program"]),
    "engine.cpp": (C, ["g++", "-std=c++17", *STRICT, "engine.cpp", "-o", "program"]),
    "engine.rs": (RUST, ["rustc", "--edition", "2021", "-D", "warnings", "engine.rs", "-o", "program"]),
}


def run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def compile_writer(folder: Path, file: str, source: str, compiler: list[str]) -> None:
    """Compile an engine beside copies of all writers."""
    if compiler and shutil.which(compiler[0]) is None:
        pytest.skip(f"NOT RUN: there is no {compiler[0]} on this machine")
    for writer in WRITERS:
        shutil.copy(writer, folder)
    (folder / file).write_text(source)
    if compiler:
        run(folder, *compiler)


@pytest.mark.parametrize("file", ENGINES)
def test_writer_output_is_read(tmp_path: Path, file: str):
    source, compiler = ENGINES[file]
    compile_writer(tmp_path, file, source, compiler)
    alone = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, '.')\n{source}"]
    run(tmp_path, *(["./program"] if compiler else alone))
    dump = open_raw(tmp_path / "dump")
    assert dump.features == Features("mine", "float32")
    assert dump.passes == (Tokens((9, 4)), Tokens((9, 5), 2))
    assert [(n, each.name, each.layer, each.tokens) for n, each in dump.arrays] == [
        (0, "q_rot", 1, None), (0, "logits", None, (1,)), (1, "q_rot", 1, None), (1, "logits", None, (1,)),
    ]  # fmt: skip
    for n, array in dump.arrays:
        q = np.arange(12, dtype=np.float32).reshape(2, 3, 2) / 8 + np.float32(n)
        wanted = q if array.name == "q_rot" else np.array([1.5, -2, 3], np.float16)
        np.testing.assert_array_equal(array.read(), wanted, strict=True)


@pytest.mark.parametrize("path", WRITERS, ids=lambda path: path.name)
def test_a_writer_is_below_60_lines(path: Path):
    assert len(path.read_text().splitlines()) < 60


GGML = r"""
#include "llorch_dump_ggml.cpp"
#include "llama.h"
int main(int, char **arguments) {
    LlorchDump dump("dump", R"("engine": "llama.cpp", "kv_cache": "f32")");
    llama_model_params of_model = llama_model_default_params();
    of_model.use_extra_bufts = false;
    llama_model *model = llama_model_load_from_file(arguments[1], of_model);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 64;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.cb_eval = LlorchDump::node;
    params.cb_eval_user_data = &dump;
    llama_context *context = llama_init_from_model(model, params);
    llama_token ids[] = {3, 1, 4, 15, 9, 2, 6, 5};
    for (int first = 0; first < 8; first += 6) {  // six tokens, then two
        const int n_ids = first ? 2 : 6;
        llama_batch batch = llama_batch_init(n_ids, 0, 1);
        for (int i = 0; i < n_ids; i++) {
            batch.token[i] = ids[first + i];
            batch.pos[i] = first + i;
            batch.n_seq_id[i] = batch.logits[i] = 1;
            batch.seq_id[i][0] = 0;
        }
        batch.n_tokens = n_ids;
        dump.begin(ids + first, n_ids, first);
        if (llama_decode(context, batch)) return 1;
    }

    LlorchDump gaps("gaps");  // channels 2 to 5 of 8, in place
    ggml_backend_t cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    ggml_context *tensors = ggml_init({1 << 20, nullptr, true});
    ggml_tensor *whole = ggml_new_tensor_2d(tensors, GGML_TYPE_F32, 8, 3);
    ggml_tensor *view = ggml_view_2d(tensors, whole, 4, 3, whole->nb[1], 8);
    ggml_tensor *part = ggml_add_inplace(tensors, view, view);
    ggml_set_name(part, "part");
    ggml_cgraph *graph = ggml_new_graph(tensors);
    ggml_build_forward_expand(graph, part);
    ggml_backend_alloc_ctx_tensors(tensors, cpu);
    float values[24];
    for (int i = 0; i < 24; i++) values[i] = (float) i;
    ggml_backend_tensor_set(whole, values, 0, sizeof values);
    ggml_backend_graph_compute(cpu, graph);
    LlorchDump::node(part, false, &gaps);  // to warm up
    gaps.begin(ids, 3);
    return LlorchDump::node(part, true, &gaps) && LlorchDump::node(part, false, &gaps) ? 0 : 1;
}
"""


@pytest.mark.live
def test_ggml_callback_writes_the_stages_of_llama_cpp(tmp_path: Path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="NOT RUN: llama-cpp-python is not installed")
    package = Path(llama_cpp.__file__).parent
    headers, libraries = package.parent / "include", package / "lib"
    if not (headers / "llama.h").exists():
        pytest.skip(f"NOT RUN: llama-cpp-python came without its headers, {headers / 'llama.h'}")
    link = [f"-I{headers}", f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lllama", "-lggml", "-lggml-base"]
    compile_writer(tmp_path, "engine.cpp", GGML, ["g++", "-std=c++17", *STRICT, "engine.cpp", *link, "-o", "program"])
    model = llorch.load("micro-llama")
    run(tmp_path, "./program", str(model.weights.path))
    dump = stage_dump(open_raw(tmp_path / "dump"), model.config, weights=model.weights)
    cache = KVCache(model.config, np.float32)
    for number, tokens in enumerate(dump.passes):
        trace: dict = {}
        model.forward(tokens.ids, cache=cache, trace=trace)
        seen = {key: one.read() for key, one in dump.of_pass(number)}
        assert len(seen) >= 40
        assert compare(seen, {key: trace[key] for key in seen}).agrees
    ((_, part),) = open_raw(tmp_path / "gaps").arrays
    np.testing.assert_array_equal(part.read(), 2 * np.arange(24, dtype=np.float32).reshape(3, 8)[:, 2:6], strict=True)
