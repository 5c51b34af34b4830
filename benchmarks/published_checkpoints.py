"""Published checkpoints of the hub, one of each family below 4 billion parameters, as a folder and as a GGUF file.

Only names are fixed: the commit is the newest one, and the table has it with the hash of the weights. Families
without a checkpoint of this size are not in the list: Qwen2-MoE, Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE, Llama 4,
Mistral. A row is NOT RUN if the hub cannot be reached, a checkpoint is gated, or memory or disk are too small.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from published_lines import Line, not_run, progress, work
from published_texts import perplexity, stages, texts

CHECKPOINTS = {
    "SmolLM2": ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF"),
    "TinyLlama": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF:Q4_K_M"),
    "Llama 3.2": ("meta-llama/Llama-3.2-1B-Instruct", "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"),
    "Qwen2.5": ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M"),
    "Qwen3": ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B-GGUF:Q8_0"),
    "Qwen3.5": ("Qwen/Qwen3.5-0.8B", "unsloth/Qwen3.5-0.8B-GGUF:Q4_K_M"),
    "SmolLM3": ("HuggingFaceTB/SmolLM3-3B", "ggml-org/SmolLM3-3B-GGUF:Q4_K_M"),
    "Ministral 3": (
        "mistralai/Ministral-3-3B-Instruct-2512-BF16",
        "mistralai/Ministral-3-3B-Instruct-2512-GGUF:Q4_K_M",
    ),
    "Qwen2.5-VL": ("Qwen/Qwen2.5-VL-3B-Instruct", "ggml-org/Qwen2.5-VL-3B-Instruct-GGUF:Q4_K_M"),
    "Qwen3-VL": ("Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-2B-Instruct-GGUF:Q4_K_M"),
}
N_STRINGS, N_PROMPTS = 2000, 3


def checkpoints(n_windows: int, n_threads: int) -> Iterator[Line]:
    """Download each checkpoint with llorch, and judge it."""
    from llorch.files.hub import find

    for family, specs in CHECKPOINTS.items():
        for spec in specs:
            progress(f"checkpoints: {spec}")
            try:
                path = find(spec, report=progress)
            except (OSError, RuntimeError) as error:
                yield not_run(f"{family}, {spec}", "hub", str(error))
                continue
            yield Line(f"{family}, {spec}", "hub", 1, 0, identity(path))
            yield from verdicts(f"{family}, {'folder' if path.is_dir() else 'GGUF'}", path, n_windows, n_threads)


def identity(path: Path) -> str:
    """Return the commit of a checkpoint, and the hash of each file of its weights."""
    from llorch.judging.goldens.forward import sha256

    folder = path if path.is_dir() else path.parent
    files = sorted(folder.glob("*.safetensors")) if path.is_dir() else [path]
    hashes = (f"{file.name} sha256 {sha256(file)}" for file in files)
    commit = next(parent.name for parent in (folder, *folder.parents) if parent.parent.name == "snapshots")
    return f"commit {commit}; {'; '.join(hashes)}"


def verdicts(name: str, path: Path, n_windows: int, n_threads: int) -> Iterator[Line]:
    """Judge tokenizer, template, stages, texts and perplexity; an exception counts as wrong."""
    steps: dict[str, Callable[[], Iterator[Line]]] = {
        "tokenizer": lambda: tokenizer(name, path),
        "template": lambda: template(name, path),
        "stages": lambda: stages(name, path),
        "texts": lambda: texts(name, decoded(path), N_PROMPTS, n_threads),
        "perplexity": lambda: iter([perplexity(name, decoded(path), n_windows, n_threads)]),
    }
    for step, lines in steps.items():
        try:
            yield from lines()
        except MemoryError as error:
            yield not_run(f"{name}, {step}", "memory", str(error))
        except Exception as error:  # the table continues with the next step
            yield Line(f"{name}, {step}", "none", 0, 1, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    decoded(path).unlink(missing_ok=True)


def decoded(path: Path) -> Path:
    """Return the checkpoint as an F32 GGUF file, written at the first use."""
    from llorch.files.convert import convert
    from llorch.files.quant import GGMLType

    target = work("checkpoint-f32.gguf")
    if not target.exists():
        convert(path, target, ggml_type=GGMLType.F32)
    return target


def tokenizer(name: str, path: Path) -> Iterator[Line]:
    """Compare ids of a folder with transformers', ids of a GGUF file with llama.cpp's."""
    from helpers.llama_vocabulary import LlamaVocabulary

    from llorch.model.model import load
    from tests.files.tokenizer.test_published import strings_for

    tokenizer_ = load(path).tokenizer
    strings = strings_for(decoded(path), N_STRINGS, seed=44)
    encode: Callable[[str], list[int]]
    if path.is_dir():
        library = auto_tokenizer(path)
        encode, judge = lambda text: library.encode(text, add_special_tokens=False), "transformers"
    else:
        vocabulary: Any = LlamaVocabulary(path)
        encode, judge = lambda text: vocabulary.encode(text, add_special=False, parse_special=True), "llama.cpp"
    wrong = sum(tokenizer_.encode(text, add_special=False, parse_special=True) != encode(text) for text in strings)
    yield Line(f"{name}, ids", judge, len(strings), wrong)


def auto_tokenizer(folder: Path) -> Any:
    """Open the tokenizer of a folder with transformers."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def template(name: str, path: Path) -> Iterator[Line]:
    """Compare the texts of conversations with those of transformers."""
    from published_vocabulary import render_both

    from llorch.model.model import load
    from tests.files.tokenizer.test_chat import PUBLISHED_CHATS

    model = load(path)
    source = model.chat_templates.get("default")
    if source is None:
        yield not_run(f"{name}, template", "transformers", "the model has no chat template")
        return
    specials = {"bos_token": model.tokenizer.bos_token_id, "eos_token": next(iter(model.tokenizer.eos_token_ids), None)}
    texts = {key: model.tokenizer.token_bytes(i).decode() for key, i in specials.items() if i is not None}
    verdicts = [render_both(source, texts, shape) for shape in PUBLISHED_CHATS]
    yield Line(
        f"{name}, template", "transformers", len(verdicts), sum(expected != actual for expected, actual in verdicts)
    )
