"""SmolLM2 as other files: quantised by llama.cpp, converted to a folder and back, and cut in parts by llama.cpp.

Every tensor of a quantised file is compared with llama.cpp's decoding of it, bit for bit. `llorch verify` judges the
stages against llama.cpp, which runs the same file.
"""

import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from published_lines import PROMPT, Line, decoded, decoded_folder, not_run, progress, smollm2, tool, work
from published_texts import as_stored, prompts

FIRST, SAMPLE, ALSO_VERIFIED = "LLAMA_FTYPE_", ("Q8_0", "Q4_0", "Q4_K_M", "Q2_K", "IQ4_XS", "TQ2_0"), ("Q4_K_M",)
NO_TYPES = ("GUESSED", "ALL_F32")
FLOAT32, N_STRINGS, N_NEW = 0, 2000, 16  # llama_ftype of F32; strings to encode; new tokens of a text


def file_types(full: bool) -> dict[str, int]:
    """Return the types of files that llama.cpp writes, by name."""
    import llama_cpp

    numbers = {
        name.removeprefix(FIRST).removeprefix("MOSTLY_"): getattr(llama_cpp, name)
        for name in dir(llama_cpp)
        if name.startswith(FIRST)
    }
    return {name: number for name, number in numbers.items() if name not in NO_TYPES and (full or name in SAMPLE)}


def types(full: bool, n_threads: int) -> Iterator[Line]:
    """Judge a file of every type that llama.cpp writes of the model."""
    from llorch.engines.process import in_child
    from llorch.runtime.errors import EngineDied

    source = decoded()
    for name, number in file_types(full).items():
        progress(f"types: {name}")
        path, copy = work(f"{name}.gguf"), work(f"{name}-f32.gguf")
        try:
            in_child("llamacpp", source, "published_quantise:quantise", source, path, number, n_threads)
            in_child("llamacpp", source, "published_quantise:quantise", path, copy, FLOAT32, n_threads)
        except (ChildProcessError, EngineDied) as error:
            yield not_run(f"SmolLM2 as {name}", "llama.cpp", str(error))
            continue
        wrong, n_tensors, note = compare_decoded(path, copy)
        yield Line(f"SmolLM2 as {name}, tensors", "llama.cpp", n_tensors, wrong, note)
        if full or name in ALSO_VERIFIED:
            yield as_stored(f"SmolLM2 as {name}, stages", path)
        path.unlink()
        copy.unlink()


def compare_decoded(path: Path, copy: Path) -> tuple[int, int, str]:
    """Compare every tensor with llama.cpp's decoding; return the number that differ, the number of all, and a note."""
    from llorch.files.gguf import open_gguf

    wrong, kinds = 0, Counter[str]()
    with open_gguf(path) as llorch_file, open_gguf(copy) as llamacpp_file:
        for name, info in llorch_file.tensors.items():
            if len(info.shape) > 1:
                kinds[info.ggml_type.name] += 1
            wrong += not np.array_equal(llorch_file.array(name), llamacpp_file.array(name))
        wrong += len(llorch_file.tensors.keys() ^ llamacpp_file.tensors.keys())
        n_tensors = len(llorch_file.tensors)
    return wrong, n_tensors, "matrices: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


def folder(n_threads: int) -> Iterator[Line]:
    """Judge the model as a folder, and as the GGUF file converted from the folder."""
    import transformers
    from helpers.llama_vocabulary import LlamaVocabulary

    from llorch.engines.process import in_child
    from llorch.files.convert import convert
    from tests.files.tokenizer.test_published import strings_for

    folder_path, gguf_path, llamacpp_path = decoded_folder(), work("back.gguf"), work("by-llamacpp.gguf")
    progress("folder: back to GGUF")
    convert(folder_path, gguf_path)
    in_child("llamacpp", smollm2(), "published_quantise:quantise", smollm2(), llamacpp_path, FLOAT32, n_threads)
    expected, actual = read_by_gguf(llamacpp_path), read_by_gguf(gguf_path)
    wrong = sum(not np.array_equal(expected[name], actual[name]) for name in expected.keys() & actual.keys())
    yield Line(
        "SmolLM2 to a folder and back, tensors",
        "llama.cpp, gguf",
        len(expected),
        wrong + len(expected.keys() ^ actual.keys()),
    )

    progress("folder: ids")
    strings = strings_for(smollm2(), N_STRINGS, seed=43)
    original, converted = LlamaVocabulary(smollm2()), LlamaVocabulary(gguf_path)
    library = transformers.AutoTokenizer.from_pretrained(folder_path)
    options: dict[str, Any] = {"add_special": False, "parse_special": True}
    expected_ids = [original.encode(text, **options) for text in strings]
    wrong = sum(converted.encode(text, **options) != ids for text, ids in zip(strings, expected_ids, strict=True))
    yield Line("SmolLM2 to a folder and back, ids", "llama.cpp", len(strings), wrong)
    wrong = sum(
        library.encode(text, add_special_tokens=False) != ids for text, ids in zip(strings, expected_ids, strict=True)
    )
    yield Line("SmolLM2 as a folder, ids", "transformers, llama.cpp", len(strings), wrong)
    original.close()
    converted.close()
    progress("folder: texts")
    yield folder_texts(folder_path, gguf_path, n_threads)


def read_by_gguf(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors of an F32 file by the gguf package."""
    from gguf import GGUFReader

    return {tensor.name: np.array(tensor.data) for tensor in GGUFReader(path).tensors}


def folder_texts(folder_path: Path, gguf_path: Path, n_threads: int) -> Line:
    """Compare transformers' texts on the folder with llama.cpp's texts on the files before and after conversion."""
    import torch
    import transformers

    from llorch.engines.process import EngineInChild

    torch.set_num_threads(n_threads)
    library = transformers.AutoTokenizer.from_pretrained(folder_path)
    ids = [library.encode(text) for text in prompts(5)]
    texts: list[list[list[int]]] = []
    engine: Any
    for path in (decoded(), gguf_path):
        with EngineInChild("llamacpp", path, "published_llamacpp:Texts", path, n_threads) as engine:
            texts.append(engine.greedy_batch(ids, N_NEW))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder_path, dtype=torch.float32).eval()
    library_texts = []
    for prompt in ids:
        output = model.generate(torch.tensor([prompt]), max_new_tokens=N_NEW, min_new_tokens=N_NEW, do_sample=False)
        library_texts.append(output[0, len(prompt) :].tolist())
    wrong = sum(len({tuple(text_ids) for text_ids in row}) > 1 for row in zip(*texts, library_texts, strict=True))
    return Line(f"SmolLM2 to a folder and back, {N_NEW} greedy tokens", "transformers, llama.cpp", len(ids), wrong)


def parts() -> Iterator[Line]:
    """Judge the model in parts written by llama.cpp's tool, opened from each part."""
    from llorch.files.gguf import open_gguf
    from llorch.model.model import load

    title, program = "SmolLM2 in parts", tool("llama-gguf-split")
    if program is None:
        yield not_run(title, "llama-gguf-split", "tests/support/build_llama_tools.py builds the tool")
        return
    subprocess.run(
        [program, "--split", "--split-max-tensors", "64", smollm2(), work("part")], check=True, capture_output=True
    )
    part_paths = sorted(work("part").parent.glob("part-*-of-*.gguf"))
    expected = load(smollm2())
    ids = expected.tokenizer.encode(PROMPT)
    logits, wrong = expected.forward(ids), 0
    with open_gguf(smollm2()) as full_file:
        for part in part_paths:
            model = load(part)
            wrong += not np.array_equal(model.forward(ids), logits)
            for name in full_file.tensors:
                wrong += not np.array_equal(model.weights.source.array(name), full_file.array(name))
    yield Line(title, "llama-gguf-split", len(part_paths), wrong, f"{len(part_paths)} parts")
