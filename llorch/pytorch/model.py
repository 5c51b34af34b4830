"""A model ready to run in torch: what `llorch.model.model` is for NumPy, on any device and in any dtype."""

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
from llorch.model.generate import Answer, Job, Look, Token, name_first_stage
from llorch.model.model import Prompt, given
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
    """Weights, tokenizer and modules of one file or folder: `module` is the forward pass, `target` where it runs."""

    def __init__(
        self, weights: Weights, target: Target, module: CausalLM, *, compiled: bool = False, mode: Mode = "fast"
    ) -> None:
        """Wrap a module with its weights and the kernels of a mode; `compiled`: decoding goes through torch.compile."""
        super().__init__(weights, module, compiled=compiled)
        self.target, self.mode = target, mode
        self._config_here = weights.config  # of a rank: that of its heads
        self._spare: Decoding | None = None

    @property
    def where(self) -> str:
        """The target of the model, `torch-cpu-float32`."""
        return str(self.target)

    def remove_adapter(self, name: str) -> None:
        """See `OpenModel.remove_adapter`."""
        super().remove_adapter(name)
        self._spare = None  # it may hold the adapter

    def new_cache(self, batch: int, n_slots: int, first_position: int = 0) -> Cache:
        """Create an empty cache; see `llorch.pytorch.cache.Cache`."""
        kind = {"dtype": self.target.dtype, "device": self.target.device}
        return Cache(self._config_here, batch=batch, n_slots=n_slots, first_position=first_position, **kind)

    @torch.no_grad()
    def forward(
        self,
        ids: Sequence[int] | np.ndarray,
        *,
        trace: dict[str, np.ndarray] | None = None,
        first_position: int = 0,
        last_only: bool = False,
        adapter: str | None = None,
    ) -> Float[np.ndarray, "rows vocab"]:
        """Compute the logits of some tokens.

        Args:
            ids: Token ids, at least one.
            trace: Filled with every stage by name, when given; attention "sdpa" has no scores and probabilities.
            first_position: Position of the first token.
            last_only: Logits of the last token only.
            adapter: The adapter to use; None runs the base alone.

        Returns:
            One row per token, or one, as float32, or float64 where the model is.

        Raises:
            ValueError: An id is out of range, there is none, they do not fit the context, or no such adapter was added.
        """
        array = self.checked_ids(ids)
        require_context(len(array), first_position, self.config.max_position_embeddings)
        keep, chunk = (keep_nothing, self._chunk(1)) if trace is None else (recorder(trace.__setitem__), len(array))
        return as_numpy(self._logits(array, adapter, keep, chunk, first_position=first_position, last_only=last_only))

    def _logits(
        self, array: Int[np.ndarray, " seq"], adapter: str | None, keep: Keep, chunk: int, *, first_position: int = 0,
        last_only: bool = True,
    ) -> Float[Tensor, "rows vocab"]:  # fmt: skip
        """Compute the logits of one sequence in passes of `chunk` tokens; of the last token, or of all."""
        module, cache = self.module_for([adapter]), self.new_cache(1, len(array), first_position)
        row = torch.from_numpy(array)[None].to(self.target.device)  # (1, seq)
        positions = torch.arange(first_position, first_position + len(array), device=row.device)[None]
        logits = []
        for start in range(0, len(array), chunk):
            new, end = slice(start, start + chunk), min(start + chunk, len(array))
            place = cache.place(positions[:, new], ctx=end, causal=True)
            last = torch.tensor([end - start - 1], device=row.device) if last_only else None
            logits.append(module(row[:, new], place, cache, keep=keep, rows=last)[0])
        return logits[-1] if last_only else torch.cat(logits)

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        max_tokens: int = 128,
        settings: SamplingSettings | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        adapter: str | None = None,
    ) -> Iterator[Token]:
        """Continue a prompt or answer a conversation, token by token.

        Arguments, tokens and errors are those of `llorch.model.model.Model.generate`; a seed draws the tokens that it
        draws in NumPy.
        """
        how = {"settings": settings, "ignore_eos": ignore_eos, "adapter": adapter}
        job = self.job(given(prompt, messages), max_tokens=max_tokens, **how)
        return (token for _, token in self._run([(0, job)], stop))

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int | Sequence[int] = 128,
        settings: SamplingSettings | Sequence[SamplingSettings] | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        adapter: str | Sequence[str | None] | None = None,
    ) -> Iterator[tuple[int, Token]]:
        """Continue many prompts at once; each answer is the one that the prompt gets alone.

        In mode "reproducible" that holds to the last bit. In mode "fast" a product of many rows may be rounded
        otherwise than one of a single row, and then two tokens that are nearly equally likely may change places.

        Args:
            prompts: Texts, ids or conversations (lists of messages), of any lengths.
            max_tokens: At most so many; as settings and adapters one, or one per prompt.
            settings: Settings of sampling.
            stop: Strings that end a text.
            ignore_eos: Go on after an end token.
            adapter: The adapter to use, None for the base alone.

        Returns:
            Index of the prompt and its next token, as they come; computed as they are taken.

        Raises:
            ValueError: An argument is out of range, a prompt is empty or does not fit the context, messages are none or
                the model has no chat template, no such adapter was added, or a compiled model is asked for several of
                them at once.
            NonFiniteRun: While tokens are taken: numbers overflow.
        """
        each = zip(
            prompts,
            one_each(max_tokens, len(prompts), name="max_tokens"),
            one_each(settings or SamplingSettings(), len(prompts), name="settings"),
            [adapter] * len(prompts) if isinstance(adapter, str) else one_each(adapter, len(prompts), name="adapter"),
            strict=True,
        )
        jobs = []
        for at, (prompt, most, how, with_adapter) in enumerate(each):
            try:
                job = self.job(prompt, max_tokens=most, settings=how, ignore_eos=ignore_eos, adapter=with_adapter)
            except ValueError as error:
                raise UserError(f"prompt {at}: {error}") from None
            jobs.append((at, job))
        return self._run(jobs, stop)

    def _run(self, numbered: Sequence[tuple[int, Job]], stop: Sequence[str]) -> Iterator[tuple[int, Token]]:
        numbered = [(at, job) for at, job in numbered if job.max_tokens > 0]
        if numbered:
            self.module_for([job.adapter for _, job in numbered])  # refuses what cannot run together
        answers = [Answer(self.tokenizer, end_ids=j.end_ids, stop=stop, max_tokens=j.max_tokens) for _, j in numbered]
        return self._tokens(numbered, answers) if numbered else iter(())

    def _tokens(self, numbered: Sequence[tuple[int, Job]], answers: Sequence[Answer]) -> Iterator[tuple[int, Token]]:
        """Generate a batch of jobs together, and yield each token with the number of its job."""
        jobs = [job for _, job in numbered]
        decoding = self._decoding(jobs)
        decoding.begin(jobs, chunk=self._chunk(len(jobs)))
        running = RunningBatch(decoding, jobs, answers, narrow=self._narrowed)
        made: list[list[int]] = [[] for _ in jobs]
        try:
            for row, token in running:
                made[row].append(token.id)
                if math.isnan(token.logprob):
                    self.name_non_finite([*jobs[row].ids, *made[row][:-1]], jobs[row].adapter)
                yield numbered[row][0], token
        finally:
            self._spare = running.decoding

    @torch.no_grad()
    def name_non_finite(self, ids: Sequence[int], adapter: str | None) -> NoReturn:
        """Refuse a run that is not finite, see `name_first_stage`."""
        name_first_stage(
            lambda look: self._logits(np.array(ids), adapter, recorder(look), self._chunk(1)),
            where=self.weights.path, dtype=self.target.dtype_name,
        )  # fmt: skip

    def _decoding(self, jobs: Sequence[Job]) -> Decoding:
        """Return the decoding of the last batch if it fits these jobs, else a new one."""
        needs, module = Needs.of([job.settings for job in jobs]), self.module_for([job.adapter for job in jobs])
        spare, self._spare = self._spare, None  # an answer that is begun meanwhile gets another
        if spare is not None and spare.fits(jobs, needs, module):
            return spare
        del spare  # its memory is wanted
        slots = min(-(-n_slots(jobs) // SLOTS) * SLOTS, self.config.max_position_embeddings)
        require_room(self.weights, self.target, batch=len(jobs), n_tokens=slots)
        n_end_ids = len(self.tokenizer.eos_token_ids)
        made = Decoding(module, self.new_cache(len(jobs), slots), needs, n_end_ids=n_end_ids)
        return self._fast(made, [job.adapter for job in jobs])

    def _narrowed(self, decoding: Decoding, rows: Sequence[int]) -> Decoding:
        """Go on with some sequences; if sequences had different adapters, those that are left need another view."""
        names = [decoding.adapters[row] for row in rows]
        module = decoding.module if len(set(decoding.adapters)) == 1 else view(decoding.module, names)
        return self._fast(decoding.narrowed(rows, self.new_cache(len(rows), decoding.cache.n_slots), module), names)

    def _fast(self, decoding: Decoding, adapters: Sequence[str | None]) -> Decoding:
        """Let a decoding use the compiled forward pass, and recorded steps where the device has them."""
        if self.compiles:
            (name,), growing = set(adapters), self.target.device.type == "cpu"
            decoding.forward = self.compiled_for(decoding.module, name, growing=growing)
        if (graph := built_kernels(self.target).get("graph")) is not None and recordable(decoding.module):
            decoding.replay = graph(None)
        return decoding

    def _chunk(self, batch: int) -> int:
        """Choose the tokens of each sequence per pass of a long prompt."""
        return max(1, CHUNK[self.target.device.type] // batch)


def recorder(take: Look) -> Keep:
    """Return a `keep` that gives `take` a copy of every stage of a batch of one."""

    def keep(name: str, array: Tensor) -> Tensor:
        take(name, as_numpy(array[0]))
        return array

    return keep


def as_numpy(array: Tensor) -> np.ndarray:
    """Copy a tensor for NumPy, which has no bfloat16: at least float32, and int64 for integers."""
    dtype = torch.promote_types(array.dtype, torch.float32) if array.is_floating_point() else torch.int64
    return array.to(dtype).cpu().numpy().copy()


def load_torch(
    path_or_name: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    kernels: Kernels = "auto",
    residency: Residency = "auto",
    attention: Attention = "sdpa",
    mode: Mode = "fast",
    compiled: bool = False,
    n_tokens: int = 1024,
) -> TorchModel:
    """Open a model to run it in torch.

    Args:
        path_or_name: As in `llorch.load`.
        device: `cpu`, `cuda` or `cuda:N`.
        dtype: The dtype of weights and activations: `float32`, `bfloat16`, `float16` or `float64`.
        kernels: `torch`: no kernels of llorch. `own`: llorch's. `auto`: llorch's; on CUDA those that are right and no
            slower there.
        residency: `decoded`: all weights in `dtype`. `packed`: quantised matrices stay packed, where they can.
        attention: `sdpa`: fused. `eager`: step by step, so that a trace has scores and probabilities.
        mode: `fast`, or `reproducible`: neighbours in a batch cannot change a token.
        compiled: Send decoding through torch.compile; the first steps then take their time.
        n_tokens: Tokens of context to keep memory for.

    Returns:
        The model, its weights loaded.

    Raises:
        FileNotFoundError: There is no such file, folder, built-in model or model of the hub.
        FormatError: The file cannot be used.
        CheckpointMismatch: `kernels` is `own`, and a kernel of llorch is wrong on this device.
        MemoryError: The model would not fit.
        MissingDevice: The device is not here, or cannot compute in the dtype.
        MissingExtra: `kernels` is `own`, and what they are compiled with is absent.
        ValueError: A name without a meaning.
    """
    at = target(device, dtype, kernels)
    for name, value, known in (
        ("residency", residency, Residency), ("attention", attention, Attention), ("mode", mode, Mode),
    ):  # fmt: skip
        if value not in get_args(known):
            raise UserError(f"load_torch: {name} must be one of {', '.join(get_args(known))}, got {value!r}")
    if compiled and mode == "reproducible":
        raise UserError(
            "load_torch: compiled=True fuses sums, which mode 'reproducible' forbids; choose one of the two"
        )
    compute_as_named(at)
    weights = open_weights(find(path_or_name))
    from_blocks = any(kind.startswith("packed") for kind in built_kernels(at))
    chosen = require_memory(weights, at, residency, n_tokens=n_tokens, from_blocks=from_blocks)
    module = (load_packed if chosen == "packed" else load_dense)(weights, dtype=at.dtype, device=at.device)
    if mode == "reproducible":
        make_reproducible(module, own=kernels != "torch")
    else:
        speed_up(module, at, attention, compiled=compiled)
    return TorchModel(weights, at, module, compiled=compiled, mode=mode)
