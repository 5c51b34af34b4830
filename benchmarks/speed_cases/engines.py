"""Engines that are timed: llorch, llama.cpp, transformers and PEFT in their defaults, and a loop that reads memory.

Each runs in a process of its own: `rounds.Process` starts this file with a JSON object and sends a method with its
arguments on each line. The answer has the seconds, the processor time and the memory of the call.
"""

import ctypes
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

READ_LOOP = """
#include <stdint.h>
uint64_t read_all(const uint64_t *numbers, long n) {
    uint64_t total = 0;
#pragma omp parallel for reduction(+ : total)
    for (long i = 0; i < n; i++) total += numbers[i];
    return total;
}
"""
READ_BYTES = 1 << 30  # larger than every cache


class Decoder:
    """Engine with a model and a cache."""

    modules: tuple[str, ...]
    _start: Callable[[], None]  # empties the cache
    _step: Callable[[Sequence[int]], object]  # runs tokens up to the logits of the last one

    def prefill(self, ids: Sequence[int]) -> None:
        """Run a prompt from an empty cache."""
        self._start()
        self._step(ids)

    def decode(self, ids: Sequence[int]) -> None:
        """Run more tokens one after the other."""
        for token_id in ids:
            self._step([token_id])

    def first(self, text: str) -> None:
        """Encode a text and run it; a model without a vocabulary gets some ids."""
        try:
            ids: Sequence[int] = self._encode(text)
        except (ValueError, RuntimeError):
            ids = list(range(100, 105))
        self.prefill(ids)

    def _encode(self, text: str) -> list[int]:
        raise NotImplementedError


class NumPy(Decoder):
    """llorch's NumPy path; its threads come from the environment."""

    modules = ("llorch.model.model",)

    def __init__(
        self, path: str, *, threads: int, room: int, numerics: str = "exact", kernels: str = "", **options: Any
    ) -> None:
        """Load a file or folder."""
        from llorch.model.cache import KVCache
        from llorch.model.model import load
        from llorch.ops.numerics import Numerics

        # A checkout before ggml's kernels has no such setting.
        form = Numerics(numerics, **({"kernels": kernels} if kernels else {}))  # type: ignore[arg-type]
        self._new_cache = KVCache.of
        self._model: Any = load(path, numerics=form, n_tokens=room, **options)

    def _encode(self, text: str) -> list[int]:
        return self._model.tokenizer.encode(text)

    def _start(self) -> None:
        self._cache = self._new_cache(self._model.weights)

    def _step(self, ids: Sequence[int]) -> None:
        self._model.forward(ids, cache=self._cache, last_only=True)


class Torch(NumPy):
    """llorch's torch path on the CPU."""

    modules = ("torch", "llorch.pytorch.model")

    def __init__(self, path: str, *, threads: int, room: int, batch: int = 1, **options: Any) -> None:
        """Load a file or folder; `batch` equal prompts run together."""
        import torch

        from llorch.pytorch.model import load_torch

        torch.set_num_threads(threads)
        self._torch, self._room, self._batch = torch, room, batch
        self._model = load_torch(path, n_tokens=room, **options)

    def _start(self) -> None:
        self._cache, self._length = self._model.new_cache(self._batch, self._room), 0

    def _step(self, ids: Sequence[int]) -> None:
        torch, start = self._torch, self._length
        self._length += len(ids)
        with torch.inference_mode():
            index = torch.arange(start, self._length).expand(self._batch, -1)
            place, rows = self._cache.place(index, ctx=self._length), torch.full((self._batch,), len(ids) - 1)
            self._model.module(torch.tensor(ids).expand(self._batch, -1), place, self._cache, rows=rows)


class LlamaCpp(Decoder):
    """llama.cpp as llama-cpp-python sets it up by default, on the CPU."""

    modules = ("llama_cpp",)

    def __init__(self, path: str, *, threads: int, room: int, use_extra_bufts: bool = True) -> None:
        """Load a GGUF file; without `use_extra_bufts` llama.cpp does not repack matrices for the processor."""
        from llama_cpp import Llama, llama_cpp

        if not use_extra_bufts:
            settings = llama_cpp.llama_model_default_params()
            settings.use_extra_bufts = False
            llama_cpp.llama_model_default_params = lambda: settings  # `Llama` has no parameter for it
        llama = Llama(path, n_ctx=room, n_threads=threads, n_threads_batch=threads, verbose=False)
        self._start, self._step, self._llama = llama.reset, llama.eval, llama

    def _encode(self, text: str) -> list[int]:
        if self._llama.metadata.get("tokenizer.ggml.model") == "no_vocab":
            raise ValueError("the model has no vocabulary")
        return self._llama.tokenize(text.encode())


class Transformers(Decoder):
    """transformers with its default attention and cache, on the CPU."""

    modules = ("torch", "transformers")

    def __init__(self, path: str, *, threads: int, room: int, dtype: str) -> None:
        """Load a Hugging Face folder."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()

    def _start(self) -> None:
        self._past = None

    def _step(self, ids: Sequence[int]) -> None:
        with self._torch.inference_mode():
            out = self._model(self._torch.tensor([ids]), past_key_values=self._past, use_cache=True, logits_to_keep=1)
        self._past = out.past_key_values


class Trainer:
    """llorch's training step on torch, as `llorch lora train` makes it."""

    modules = ("torch", "llorch.pytorch.train.trainer")

    def __init__(self, path: str, *, threads: int, data: str, **settings: Any) -> None:
        """Load the model; `settings` are those of `llorch lora train`."""
        import torch

        from llorch.pytorch.train.plan import plan_training
        from llorch.pytorch.train.trainer import Training
        from llorch.training.settings import TrainSettings

        torch.set_num_threads(threads)
        modules = tuple(settings.pop("target_modules"))
        self._training = Training(
            plan_training(TrainSettings(model=path, data=data, target_modules=modules, **settings))
        )
        memory = self._training.memory
        self._announced, self._first_loss = 0 if memory is None else memory.peak, 0.0

    def step(self) -> dict[str, float]:
        """Make a step; return the loss of the first step, and the peak that `llorch lora train` announces."""
        loss = self._training.run_step().loss
        self._first_loss = self._first_loss or loss
        return {"loss": self._first_loss, "announced": self._announced}


class PEFT:
    """PEFT over transformers, which computes the loss itself."""

    modules = ("torch", "transformers", "peft")

    def __init__(
        self, path: str, *, threads: int, data: str, dtype: str, device: str, r: int, alpha: float,
        target_modules: Sequence[str], **_: Any,
    ) -> None:  # fmt: skip
        """Load a Hugging Face folder and attach a fresh adapter."""
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        base = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device)
        lora = LoraConfig(r=r, lora_alpha=int(alpha), target_modules=list(target_modules), task_type="CAUSAL_LM")
        self._model, self._torch = get_peft_model(base, lora).train(), torch
        self._trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trainable, lr=1e-4)
        self._ids, self._first_loss = torch.tensor(read_ids(data), device=device), 0.0

    def step(self) -> dict[str, float]:
        """See `Trainer`."""
        loss = self._model(input_ids=self._ids, labels=self._ids).loss
        loss.backward()
        self._torch.nn.utils.clip_grad_norm_(self._trainable, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._first_loss = self._first_loss or loss.item()
        return {"loss": self._first_loss}


class Memory:
    """Read bandwidth of the machine: a loop in C, or NumPy's sum without a compiler."""

    modules = ("numpy",)

    def __init__(self, path: str, *, threads: int, compiler: Sequence[str]) -> None:
        """Write the array and compile the loop in the folder `path`."""
        import subprocess

        import numpy as np

        from llorch.ops.compiled.library import FLAGS

        self._array, self._threads = np.ones(READ_BYTES // 8, np.uint64), threads
        self._loop: Callable[[], object] = self._sum
        if compiler:
            source, file = Path(path) / "read.c", Path(path) / "read.so"
            source.write_text(READ_LOOP)
            subprocess.run([*compiler, *FLAGS, source, "-o", file], check=True, capture_output=True)
            function = ctypes.CDLL(str(file)).read_all
            function.restype = ctypes.c_uint64
            pointer, n = ctypes.c_void_p(self._array.ctypes.data), ctypes.c_long(len(self._array))
            self._loop = lambda: function(pointer, n)

    def _sum(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        import numpy as np

        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(np.sum, np.array_split(self._array, self._threads)))

    def read(self) -> int:
        """Read the array once; return its bytes."""
        self._loop()
        return READ_BYTES


def read_ids(data: str) -> list[list[int]]:
    """Read the rows of a file of token ids."""
    return [json.loads(line)["input_ids"] for line in Path(data).read_text().splitlines()]


def write_ids(path: Path, rows: int, tokens: int) -> None:
    """Write rows of random token ids below 1000."""
    draws = random.Random(0)
    lines = (json.dumps({"input_ids": [draws.randrange(1000) for _ in range(tokens)]}) for _ in range(rows))
    path.write_text("\n".join(lines))


def busy_seconds() -> float:
    """Read the seconds that all processors have worked since the system's start; 0 if it does not report them."""
    try:
        user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:9]
    except OSError:
        return 0.0
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def resident(field: str) -> int:
    """Count the bytes of this process in memory, now (VmRSS) or at most (VmHWM); 0 if the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def timed(action: Callable[..., Any], *args: object) -> dict[str, Any]:
    """Time a call; `others` is the share of the processors that other programs used, `peak` that of the process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, busy, cpu, start = resident("VmRSS"), busy_seconds(), time.process_time(), time.perf_counter()
    value = action(*args)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    others = max(0.0, busy_seconds() - busy - cpu) / seconds / (os.cpu_count() or 1)
    peak = resident("VmHWM")
    return {"seconds": seconds, "cpu": cpu, "others": others, "value": value, "before": before, "peak": peak}


def mark(start: float) -> dict[str, float]:
    """Return wall time since `start`, and processor time and memory of the process."""
    return {"seconds": time.monotonic() - start, "cpu": time.process_time(), "bytes": resident("VmRSS")}


def main() -> None:
    """Load the engine that the command line describes, and answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        setup = json.loads(sys.argv[1])
        kind, marks = globals()[setup["kind"]], {"start": mark(setup["start"])}
        for module in kind.modules:
            import_module(module)
            marks["torch" if module == "torch" else "import"] = mark(setup["start"])
        engine = kind(setup["path"], threads=setup["threads"], **setup["options"])
        answer(marks | {"load": mark(setup["start"]) | {"peak": resident("VmHWM")}})
        for line in sys.stdin:
            method, *args = json.loads(line)
            answer(timed(getattr(engine, method), *args))
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
