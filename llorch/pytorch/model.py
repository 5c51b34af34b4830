"""A model loaded into torch modules, on any device and in any dtype. `llorch.model.model` is the NumPy counterpart."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NoReturn, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from llorch.files import Weights, open_weights
from llorch.files.hub import find
from llorch.files.residency import Residency
from llorch.files.tokenizer.chat import Message
from llorch.model.cache import require_context
from llorch.model.generate import Answer, Job, StageCallback, Token, raise_first_non_finite
from llorch.model.model import Prompt, require_one_prompt
from llorch.ops.sampling import SamplingSettings
from llorch.pytorch.batch import RunningBatch, one_each
from llorch.pytorch.batch_invariant.reproducible import make_reproducible
from llorch.pytorch.cache import Cache
from llorch.pytorch.causal_lm import CausalLM, Keep, keep_nothing
from llorch.pytorch.decoding import Decoding, n_slots, recordable
from llorch.pytorch.device import Kernels, Target, compute_as_named, target
from llorch.pytorch.kernels.kernel_selection import Attention, built_kernels, speed_up
from llorch.pytorch.load import load_dense, load_packed
from llorch.pytorch.lora.serving import AdaptedModules, view
from llorch.pytorch.memory import CHUNK, SLOTS, require_memory, require_room
from llorch.pytorch.sampling import Needs
from llorch.runtime.errors import UserError

Mode = Literal["fast", "reproducible"]


class TorchModel(AdaptedModules):
    """Weights, tokenizer and torch modules of one model; `module` computes the forward pass on `target`."""

    def __init__(
        self, weights: Weights, target: Target, module: CausalLM, *, compiled: bool = False, mode: Mode = "fast"
    ) -> None:
        """Wrap a module with its weights; `mode`: see `load_torch`; `compiled`: decode steps use torch.compile."""
        super().__init__(weights, module, compiled=compiled)
        self.target, self.mode = target, mode
        self._rank_config = weights.config  # under tensor parallelism: the heads of this rank
        self._spare: Decoding | None = None  # of the last batch, whose cache and CUDA graphs the next batch may use

    @property
    def where(self) -> str:
        """The target of the model, `torch-cpu-float32`."""
        return str(self.target)

    def remove_adapter(self, name: str) -> None:
        """See `OpenModel.remove_adapter`."""
        super().remove_adapter(name)
        self._spare = None  # its module may contain the adapter

    def new_cache(self, batch: int, n_slots: int, first_position: int = 0) -> Cache:
        """Create an empty cache; see `llorch.pytorch.cache.Cache`."""
        storage = {"dtype": self.target.dtype, "device": self.target.device}
        return Cache(self._rank_config, batch=batch, n_slots=n_slots, first_position=first_position, **storage)

    @torch.no_grad()
    def forward(
        self, ids: Sequence[int] | np.ndarray, *, trace: dict[str, np.ndarray] | None = None, first_position: int = 0,
        last_only: bool = False, adapter: str | None = None,
    ) -> Float[np.ndarray, "rows vocab"]:  # fmt: skip
        """Compute the logits of some tokens.

        Args:
            ids: Token ids, at least one.
            trace: Dict to fill with every stage by name; attention "sdpa" has no scores and probabilities.
            first_position: Position of the first token.
            last_only: Compute the logits of the last token only.
            adapter: The adapter to use; None runs the base alone.

        Returns:
            One row per token, or the last row; float64 for a float64 model, else float32.

        Raises:
            UserError: `ids` is empty, has an id out of range or exceeds the context, or the adapter is unknown.
        """
        array = self.checked_ids(ids)
        require_context(len(array), first_position, self.config.max_position_embeddings)
        # a trace has one array per stage, so all tokens are one pass
        keep, chunk = (keep_nothing, self._chunk(1)) if trace is None else (recorder(trace.__setitem__), len(array))
        return as_numpy(self._logits(array, adapter, keep, chunk, first_position=first_position, last_only=last_only))

    def _logits(
        self, array: Int[np.ndarray, " seq"], adapter: str | None, keep: Keep, chunk: int, *, first_position: int = 0,
        last_only: bool = True,
    ) -> Float[Tensor, "rows vocab"]:  # fmt: skip
        """Compute the logits of the last token, or of all tokens, of one sequence in passes of `chunk` tokens."""
        module, cache = self.module_for([adapter]), self.new_cache(1, len(array), first_position)
        row = torch.from_numpy(array)[None].to(self.target.device)  # (1, seq)
        positions = torch.arange(first_position, first_position + len(array), device=row.device)[None]
        logits = []
        for start in range(0, len(array), chunk):
            chunk_slice, end = slice(start, start + chunk), min(start + chunk, len(array))
            place = cache.place(positions[:, chunk_slice], ctx=end, causal=True)
            last_row = torch.tensor([end - start - 1], device=row.device) if last_only else None
            logits.append(module(row[:, chunk_slice], place, cache, keep=keep, rows=last_row)[0])
        return logits[-1] if last_only else torch.cat(logits)

    def generate(
        self, prompt: str | Sequence[int] | None = None, *, messages: Sequence[Message] | None = None,
        max_tokens: int = 128, settings: SamplingSettings | None = None, stop: Sequence[str] = (),
        ignore_eos: bool = False, adapter: str | None = None,
    ) -> Iterator[Token]:  # fmt: skip
        """Continue a prompt or answer a conversation, token by token.

        Arguments, errors and tokens, also for a given seed, are those of `llorch.model.model.Model.generate`.
        """
        options = {"settings": settings, "ignore_eos": ignore_eos, "adapter": adapter}
        job = self.job(require_one_prompt(prompt, messages), max_tokens=max_tokens, **options)
        return (token for _, token in self._run([(0, job)], stop))

    def generate_batch(
        self, prompts: Sequence[Prompt], *, max_tokens: int | Sequence[int] = 128,
        settings: SamplingSettings | Sequence[SamplingSettings] | None = None, stop: Sequence[str] = (),
        ignore_eos: bool = False, adapter: str | Sequence[str | None] | None = None,
    ) -> Iterator[tuple[int, Token]]:  # fmt: skip
        """Continue many prompts in one batch; each answer equals the answer to its prompt alone.

        In mode "reproducible" this holds to the last bit. In mode "fast" a product of many rows may round differently
        from a product of one row, which can swap two tokens of nearly equal probability.

        Args:
            prompts: Texts, ids or conversations (lists of messages), of any lengths.
            max_tokens: Maximum number of new tokens; one value or one per prompt, as for settings and adapters.
            settings: Sampling settings.
            stop: Strings that end an answer.
            ignore_eos: Continue after an EOS token.
            adapter: The adapter to use; None runs the base alone.

        Returns:
            Index of a prompt and its next token; each token is computed when it is requested.

        Raises:
            UserError: An argument is out of range, a prompt is empty or exceeds the context, the messages are empty,
                the model has no chat template, the adapter is unknown, or a compiled model gets several adapters.
            NonFiniteRun: Numbers overflow; raised while tokens are generated.
        """
        requests = zip(
            prompts,
            one_each(max_tokens, len(prompts), name="max_tokens"),
            one_each(settings or SamplingSettings(), len(prompts), name="settings"),
            [adapter] * len(prompts) if isinstance(adapter, str) else one_each(adapter, len(prompts), name="adapter"),
            strict=True,
        )
        jobs = []
        for index, (prompt, limit, sampling, name) in enumerate(requests):
            try:
                job = self.job(prompt, max_tokens=limit, settings=sampling, ignore_eos=ignore_eos, adapter=name)
            except ValueError as error:
                raise UserError(f"prompt {index}: {error}") from None
            jobs.append((index, job))
        return self._run(jobs, stop)

    def _run(self, numbered: Sequence[tuple[int, Job]], stop: Sequence[str]) -> Iterator[tuple[int, Token]]:
        """Check at once that these jobs (index, job) can share a batch, then generate lazily; no tokens for none."""
        numbered = [(index, j) for index, j in numbered if j.max_tokens > 0]
        if numbered:
            self.module_for([j.adapter for _, j in numbered])  # raises if these adapters cannot share a batch
        answers = [Answer(self.tokenizer, end_ids=j.end_ids, stop=stop, max_tokens=j.max_tokens) for _, j in numbered]
        return self._generate(numbered, answers) if numbered else iter(())

    def _generate(self, numbered: Sequence[tuple[int, Job]], answers: Sequence[Answer]) -> Iterator[tuple[int, Token]]:
        """Generate a batch of jobs (index, job) and yield each token with the index of its job."""
        jobs = [job for _, job in numbered]
        decoding = self._decoding(jobs)
        decoding.begin(jobs, chunk=self._chunk(len(jobs)))
        running = RunningBatch(decoding, jobs, answers, narrow=self._narrow)
        generated_ids: list[list[int]] = [[] for _ in jobs]
        try:
            for row, token in running:
                generated_ids[row].append(token.id)
                if math.isnan(token.logprob):  # the mark of logits that are not finite, see `sampling.choose`
                    self.name_non_finite([*jobs[row].ids, *generated_ids[row][:-1]], jobs[row].adapter)
                yield numbered[row][0], token
        finally:
            self._spare = running.decoding

    @torch.no_grad()
    def name_non_finite(self, ids: Sequence[int], adapter: str | None) -> NoReturn:
        """Run these tokens again and raise `NonFiniteRun` with the first stage that is not finite."""
        raise_first_non_finite(
            lambda on_stage: self._logits(np.array(ids), adapter, recorder(on_stage), self._chunk(1)),
            where=self.weights.path, dtype=self.target.dtype_name,
        )  # fmt: skip

    def _decoding(self, jobs: Sequence[Job]) -> Decoding:
        """Return the last batch's decoding if these jobs can run in it, else a new decoding."""
        needs, module = Needs.of([job.settings for job in jobs]), self.module_for([job.adapter for job in jobs])
        spare, self._spare = self._spare, None  # a generator that starts before this one ends must not share it
        if spare is not None and spare.fits(jobs, needs, module):
            return spare
        del spare  # free its cache before the next one is allocated
        slots = min(-(-n_slots(jobs) // SLOTS) * SLOTS, self.config.max_position_embeddings)
        require_room(self.weights, self.target, batch=len(jobs), n_tokens=slots)
        n_end_ids = len(self.tokenizer.eos_token_ids)
        decoding = Decoding(module, self.new_cache(len(jobs), slots), needs, n_end_ids=n_end_ids)
        return self._speed_up(decoding, [job.adapter for job in jobs])

    def _narrow(self, decoding: Decoding, rows: Sequence[int]) -> Decoding:
        """Keep some sequences of a batch; if the adapters differ, the remaining rows need a new view of the module."""
        names = [decoding.adapters[row] for row in rows]
        module = decoding.module if len(set(decoding.adapters)) == 1 else view(decoding.module, names)
        return self._speed_up(decoding.narrowed(rows, self.new_cache(len(rows), decoding.cache.n_slots), module), names)

    def _speed_up(self, decoding: Decoding, adapters: Sequence[str | None]) -> Decoding:
        """Use the compiled forward pass, and CUDA graphs where the device has them, for a decoding."""
        if self.compiles:
            (name,), growing = set(adapters), self.target.device.type == "cpu"
            decoding.forward = self.compiled_for(decoding.module, name, growing=growing)
        if (graph := built_kernels(self.target).get("graph")) is not None and recordable(decoding.module):
            decoding.replay = graph(None)
        return decoding

    def _chunk(self, batch: int) -> int:
        """Return the number of prefill tokens per sequence and pass."""
        return max(1, CHUNK[self.target.device.type] // batch)


def recorder(on_stage: StageCallback) -> Keep:
    """Return a `keep` that calls `on_stage(name, array)` with a copy of every stage of a batch of one."""

    def keep(name: str, array: Tensor) -> Tensor:
        on_stage(name, as_numpy(array[0]))
        return array

    return keep


def as_numpy(array: Tensor) -> np.ndarray:
    """Copy a tensor to NumPy, which has no bfloat16: floats to at least float32, integers to int64."""
    dtype = torch.promote_types(array.dtype, torch.float32) if array.is_floating_point() else torch.int64
    return array.to(dtype).cpu().numpy().copy()


def load_torch(
    path_or_name: str | Path, *, device: str = "cpu", dtype: str = "float32", kernels: Kernels = "auto",
    residency: Residency = "auto", attention: Attention = "sdpa", mode: Mode = "fast", compiled: bool = False,
    n_tokens: int = 1024,
) -> TorchModel:  # fmt: skip
    """Open a model to run it in torch.

    Args:
        path_or_name: As in `llorch.load`.
        device: `cpu`, `cuda` or `cuda:N`.
        dtype: The dtype of weights and activations: `float32`, `bfloat16`, `float16` or `float64`.
        kernels: `torch`: no kernels of llorch. `own`: all of llorch's. `auto`: as `own`, but on CUDA only kernels that
            pass their check and are not slower than torch.
        residency: `decoded`: all weights in `dtype`. `packed`: quantised matrices stay packed where possible.
        attention: `sdpa`: fused. `eager`: unfused, so that a trace has scores and probabilities.
        mode: `fast`, or `reproducible`: a token's logits have the same bits whatever else is in the batch.
        compiled: Decode with torch.compile; the first steps are slow because they compile.
        n_tokens: Number of context tokens to reserve memory for.

    Returns:
        The model with its weights loaded.

    Raises:
        FileNotFoundError: No file, folder, built-in model or hub model has this name.
        FormatError: The file cannot be used.
        CheckpointMismatch: `kernels` is `own`, and a kernel of llorch is wrong on this device.
        MemoryError: The model does not fit in memory.
        MissingDevice: The device is absent or does not support the dtype.
        MissingExtra: `kernels` is `own`, and their compiler is not installed.
        UserError: An option has an unknown value, or two options exclude each other.
    """
    backend = target(device, dtype, kernels)
    for name, choice, allowed in (
        ("residency", residency, Residency), ("attention", attention, Attention), ("mode", mode, Mode),
    ):  # fmt: skip
        if choice not in get_args(allowed):
            raise UserError(f"load_torch: {name} must be one of {', '.join(get_args(allowed))}, got {choice!r}")
    if compiled and mode == "reproducible":
        raise UserError(
            "load_torch: compiled=True fuses sums, which mode 'reproducible' forbids; choose one of the two"
        )
    compute_as_named(backend)
    weights = open_weights(find(path_or_name))
    from_blocks = any(kind.startswith("packed") for kind in built_kernels(backend))  # kernels that read packed blocks
    storage = require_memory(weights, backend, residency, n_tokens=n_tokens, from_blocks=from_blocks)
    module = (load_packed if storage == "packed" else load_dense)(weights, dtype=backend.dtype, device=backend.device)
    if mode == "reproducible":
        make_reproducible(module, own=kernels != "torch")
    else:
        speed_up(module, backend, attention, compiled=compiled)
    return TorchModel(weights, backend, module, compiled=compiled, mode=mode)
