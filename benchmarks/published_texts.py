"""SmolLM2 against llama.cpp: stages, greedy texts, perplexity, and the torch path in every dtype.

Texts are judged on weights decoded to float32 by `llorch convert`: both engines then have the same F32 file. A text may
differ only if llama.cpp's logits of the two tokens are closer than llama.cpp's runs differ there. Runs of
llama.cpp are: all tokens in one pass or the last one after a cache, each with the tensor layouts for the processor
(`use_extra_bufts`, which repacks weights) and without. Repacking changes no F32 weight, and no Q4_1 weight either, so
between runs with and without it no bit may differ; the note counts them.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from published_lines import PROMPT, ROOT, Line, all_lines, decoded, not_run, progress, smollm2, tool, work

from llorch.model.model import load

SUBJECTS = ("The fox", "My neighbour", "A computer", "The capital of France", "Our teacher", "An old ship", "The river")
VERBS = ("is", "was never", "can always", "wanted to", "will soon", "said that", "looks like")
ENDS = ("", " a", " the", " because", " not", " in the morning and")
N_TOKENS = 64
N_NUMPY = 10  # texts that the NumPy path writes, too, one after the other
AT_ONCE = 50  # texts in one batch of an engine
CONTEXT, WINDOWS = 512, 40  # 20,480 tokens
# The tool repacks weights, and keeps keys and values in float16, unless options say otherwise.
AS_LLORCH = ("--no-repack", "-fa", "off", "-ctk", "f32", "-ctv", "f32")
ROUNDING = 1e-3  # share of a perplexity that float32 may move
DTYPES = ("float32", "bfloat16", "float16")


def prompts(n: int) -> list[str]:
    """Return beginnings of sentences in a fixed order."""
    sentences = [f"{subject} {verb}{end}" for end in ENDS for verb in VERBS for subject in SUBJECTS]
    return sentences[:n]


def stages(name: str, path: Path) -> Iterator[Line]:
    """Judge every stage of a file: as stored if it is quantised, and decoded."""
    from llorch.files import open_weights
    from llorch.judging.verify import plan_live, verify_live
    from llorch.stages.comparison import FAIL

    if path.is_file():
        progress(f"stages: {name} as stored")
        yield as_stored(f"{name} as stored", path)
    progress(f"stages: {name} decoded")
    ids = load(path).tokenizer.encode(PROMPT)
    comparisons = list(verify_live(plan_live(open_weights(path), ids, ("llamacpp", "transformers"), text=PROMPT)))
    yield Line(f"{name} decoded", "both, float64", len(comparisons), sum(row.verdict == FAIL for row in comparisons))


def as_stored(title: str, path: Path) -> Line:
    """Judge the stages of a file against llama.cpp running it."""
    from llorch.judging.verify import verify_ggml
    from llorch.ops.numerics import GGML
    from llorch.stages.comparison import FAIL

    model = load(path, numerics=GGML)
    comparisons = list(verify_ggml(model, model.tokenizer.encode(PROMPT), text=PROMPT))
    return Line(title, "llama.cpp", len(comparisons), sum(row.verdict == FAIL for row in comparisons))


def texts(name: str, path: Path, n_prompts: int, n_threads: int) -> Iterator[Line]:
    """Compare greedy texts of an F32 file."""
    import torch

    from llorch.engines.process import EngineInChild
    from llorch.pytorch.model import load_torch

    model = load(path)
    ids = [model.tokenizer.encode(text) for text in prompts(n_prompts)]
    engine: Any
    with EngineInChild("llamacpp", path, "published_llamacpp:Texts", path, n_threads) as engine:
        llamacpp_texts: list[list[int]] = []
        for start in range(0, len(ids), AT_ONCE):
            llamacpp_texts += engine.greedy_batch(ids[start : start + AT_ONCE], N_TOKENS)
            progress(f"texts: llama.cpp wrote {len(llamacpp_texts)} of {len(ids)}")
        torch.set_num_threads(n_threads)
        llorch_texts = list(_by_torch(load_torch(path), ids))
        yield _compare_texts(f"{name}, torch", engine, ids, llorch_texts, llamacpp_texts)
        llorch_texts = list(_by_numpy(model, ids[:N_NUMPY]))
        yield _compare_texts(f"{name}, NumPy", engine, ids[:N_NUMPY], llorch_texts, llamacpp_texts[:N_NUMPY])


def _by_torch(model: Any, ids: list[list[int]]) -> Iterator[list[int]]:
    for start in range(0, len(ids), AT_ONCE):
        batch = ids[start : start + AT_ONCE]
        texts: list[list[int]] = [[] for _ in batch]
        for row, token in model.generate_batch(batch, max_tokens=N_TOKENS, ignore_eos=True):
            texts[row].append(token.id)
        progress(f"texts: torch wrote {start + len(batch)} of {len(ids)}")
        yield from texts


def _by_numpy(model: Any, ids: list[list[int]]) -> Iterator[list[int]]:
    for n_written, prompt in enumerate(ids, start=1):
        yield [token.id for token in model.generate(prompt, max_tokens=N_TOKENS, ignore_eos=True)]
        progress(f"texts: NumPy wrote {n_written} of {len(ids)}")


def _compare_texts(
    title: str, engine: Any, ids: list[list[int]], texts: list[list[int]], expected: list[list[int]]
) -> Line:
    """Compare texts; a difference is allowed if llama.cpp's own runs differ by more than the two tokens."""
    differing = [row for row in range(len(ids)) if texts[row] != expected[row]]
    ties = [tie(engine, ids[row], texts[row], expected[row]) for row in differing]
    allowed = sum(is_tie for is_tie, _ in ties)
    bits = sum(has_moved for _, has_moved in ties)
    note = f"{len(differing)} differ, {allowed} of them where llama.cpp's runs differ by more than the two tokens"
    if differing:
        note += f"; repacking changed a bit of {bits} of these {len(differing)} rows of logits"
    return Line(f"{title}, {N_TOKENS} greedy tokens", "llama.cpp", len(ids), len(differing) - allowed, note)


def tie(engine: Any, ids: list[int], actual: list[int], expected: list[int]) -> tuple[bool, bool]:
    """Return whether llama.cpp's runs differ by more than the two tokens, and whether repacking changes a bit."""
    index = next((i for i, (first, second) in enumerate(zip(actual, expected, strict=False)) if first != second), None)
    if index is None:  # one text is the beginning of the other: no rounding does that
        return False, False
    runs: dict[str, np.ndarray] = engine.runs([*ids, *expected[:index]])
    row = runs["one pass"]
    spread = max(float(np.abs(run - row).max()) for run in runs.values())
    return abs(float(row[actual[index]] - row[expected[index]])) <= spread, bool((runs["repacked"] != row).any())


def book() -> tuple[str, Path]:
    """Write the text for perplexities; return its name and the file."""
    from pydoc_data.topics import topics

    python = ".".join(map(str, sys.version_info[:3]))
    path = work("topics.txt")
    path.write_text("\n\n".join(topics[name] for name in sorted(topics))[: 6 * CONTEXT * WINDOWS], encoding="utf-8")
    return f"pydoc_data.topics of Python {python}", path


def perplexity(name: str, path: Path, n_windows: int, n_threads: int, numerics: str = "exact") -> Line:
    """Compare the perplexity of a file with that of llama.cpp's tool."""
    program, title = tool("llama-perplexity"), f"{name}, perplexity"
    if program is None:
        return not_run(title, "llama-perplexity", "tests/support/build_llama_tools.py builds the tool")
    source, text = book()
    progress(f"perplexity: {name}, llama.cpp")
    expected, error = _llamacpp_perplexity(program, path, text, n_windows, n_threads)
    progress(f"perplexity: {name}, llorch")
    actual, n = _llorch_perplexity(path, text, n_windows, n_threads, numerics)
    note = f"{actual:.4f}, tool {expected:.4f} +- {error:.4f}; {source}, {n_windows * CONTEXT} tokens, {n} scored"
    return Line(title, "llama-perplexity", 1, int(not agree(actual, expected, error, numerics)), note)


def agree(actual: float, expected: float, error: float, numerics: str) -> bool:
    """Return whether two perplexities agree.

    The tool's error is the sampling error of the text, which both share. So float weights, where nothing else is
    rounded to few bits, must agree to a thousandth.
    """
    return abs(actual - expected) <= (min(error, ROUNDING * expected) if numerics == "exact" else error)


def perplexities(n_windows: int, n_threads: int) -> Iterator[Line]:
    """Compare perplexities of SmolLM2, decoded and as it is stored."""
    yield perplexity("SmolLM2 decoded", decoded(), n_windows, n_threads)
    yield perplexity("SmolLM2 as stored", smollm2(), n_windows, n_threads, "ggml")


def _llorch_perplexity(path: Path, text: Path, n_windows: int, n_threads: int, numerics: str) -> tuple[float, int]:
    options = ("--text", text, "--context", CONTEXT, "--windows", n_windows, "--threads", n_threads)
    scores = llorch("quality", str(path), *map(str, options), "--numerics", numerics, "--json")
    return scores["perplexity"]["value"], scores["n_scored"]


def _llamacpp_perplexity(program: Path, path: Path, text: Path, n_windows: int, n_threads: int) -> tuple[float, float]:
    options = ["-m", path, "-f", text, "-c", CONTEXT, "-b", CONTEXT, "--chunks", n_windows, "-t", n_threads]
    process = subprocess.run([program, *map(str, options), *AS_LLORCH], capture_output=True, text=True, check=False)
    match = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", process.stdout + process.stderr)
    if process.returncode or match is None:
        last = (process.stderr or process.stdout).strip().splitlines()[-3:]
        raise RuntimeError(f"llama-perplexity ended with {process.returncode}: {all_lines(last)}")
    return float(match[1]), float(match[2])


def llorch(*words: str) -> Any:
    """Run a verb in a child process; return the object that it prints."""
    process = subprocess.run(
        [sys.executable, "-m", "llorch", *words], capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"TMPDIR": tempfile.gettempdir()},
    )  # fmt: skip
    if process.returncode not in (0, 1):
        raise RuntimeError(f"llorch {words[0]} ended with {process.returncode}: {process.stderr.strip()[-500:]}")
    return json.loads(process.stdout)


def dtypes(n_threads: int) -> Iterator[Line]:
    """Judge the torch path in every dtype, as `llorch verify` does."""
    for dtype in DTYPES:
        progress(f"torch: {dtype}")
        options = ("--backend", "torch", "--dtype", dtype, "--prompt", PROMPT, "--threads", str(n_threads), "--json")
        report = llorch("verify", str(smollm2()), *options)
        failures = [row for row in report["comparisons"] if row["verdict"] not in ("PASS", "TIE")]
        yield Line(f"SmolLM2, torch in {dtype}", "both, float64", len(report["comparisons"]), len(failures))
