"""A model ready to run: weights, tokenizer, and the forward pass with checks of its arguments."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Float

from llorch.families.config import ModelConfig
from llorch.files import Weights, open_weights
from llorch.files.gguf import GGUFFile
from llorch.files.hub import find
from llorch.files.hub.reference import name_of
from llorch.files.opening import image_token_ids
from llorch.files.residency import Residency, ResidencyPlan, plan
from llorch.files.tokenizer import Tokenizer
from llorch.files.tokenizer.chat import Message, read_templates, templates_of_metadata
from llorch.files.tokenizer.conversation import Chats
from llorch.files.tokenizer.messages import checked_messages
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter, require_fits, require_free, require_known
from llorch.lora.files import adapter_for
from llorch.model.blocks import forward
from llorch.model.cache import KVCache, require_context
from llorch.model.generate import Answer, Job, StageCallback, Step, Token, raise_first_non_finite, sample_ids, stream
from llorch.ops.numerics import EXACT, Numerics
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.errors import UserError
from llorch.runtime.fields import Fields
from llorch.runtime.memory import keep_freed_memory

Ids = Sequence[int] | np.ndarray
Prompt = str | Sequence[int] | Sequence[Message]
_CHARACTERS_PER_TOKEN = 4  # in English; a prompt with fewer per context token is not tokenized for the check alone
PREFILL_CHUNK = 512  # tokens per pass of a long prompt: bounds the memory of the attention scores


class OpenModel:
    """Weights and tokenizer of one file or folder, for any backend."""

    def __init__(self, weights: Weights) -> None:
        """Wrap weights that `llorch.files.open_weights` opened."""
        self.weights = weights
        self._adapters: dict[str, Adapter] = {}

    @property
    def adapters(self) -> list[str]:
        """Names of the added adapters."""
        return list(self._adapters)

    def add_adapter(self, name: str, adapter: Adapter | str | Path, *, any_base: bool = False) -> str:
        """Add an adapter, to be used by its name; the weights do not change.

        Args:
            name: Name of the adapter.
            adapter: A PEFT directory, a LoRA GGUF file, or an adapter in memory.
            any_base: Accept an adapter that was trained on another base of the same shapes.

        Returns:
            A sentence about the base that the adapter was trained on.

        Raises:
            FileNotFoundError: There is no such file or folder.
            FormatError: The file cannot be used with this model; BaseMismatch for another base.
            UserError: The name is taken or unusable, or the adapter is for another model.
        """
        require_free(name, self.adapters)
        loaded_adapter, base_message = adapter_for(self.weights, adapter, any_base=any_base)
        require_fits(name, loaded_adapter, self.config)
        self._adapters[name] = loaded_adapter
        return base_message

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter; running generations with it continue.

        Args:
            name: Name of the adapter.

        Raises:
            UserError: There is no adapter of this name.
        """
        require_known(name, self.adapters)
        del self._adapters[name]

    @property
    def config(self) -> ModelConfig:
        """Hyperparameters of the model."""
        return self.weights.config

    @property
    def name(self) -> str:
        """File name without its suffix, folder name, or `org/name` for a model of the hub."""
        return name_of(Path(self.weights.path))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model; read on first use.

        Raises:
            FormatError: The file has no tokenizer, or one that llorch cannot reproduce.
        """
        source = self.weights.source
        if isinstance(source, GGUFFile):
            return Tokenizer.from_gguf(source)
        return Tokenizer.from_huggingface(Path(self.weights.path))

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name, `default` for the unnamed one; empty if the model has none.

        Raises:
            FormatError: A chat template is not a string.
        """
        source = self.weights.source
        if isinstance(source, GGUFFile):
            return templates_of_metadata(source.metadata, source.path)
        return read_templates(Path(self.weights.path))

    @cached_property
    def chats(self) -> Chats:
        """Chat format of the model; its template is read and checked at the first conversation."""
        return Chats(lambda: self.chat_templates, self.tokenizer, path=self.weights.path)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Encode a text with special tokens, or a conversation, or return ids; UserError if a text is far too long."""
        if isinstance(prompt, str):
            self.require_text_fits(prompt)
            return self.tokenizer.encode(prompt)
        if _is_conversation(prompt):
            rendered = self.chats.written(_checked_conversation(prompt))
            self.require_text_fits(rendered.text)
            return self.chats.encoded(rendered)
        return list(prompt)  # type: ignore[arg-type] (ids)

    def require_text_fits(self, text: str) -> None:
        """Raise UserError for a text with a prefix of more than twice the tokens of the context.

        Only the prefix is tokenized, so that a huge text fails fast. The factor is two because the last tokens of a
        prefix may differ in the full text. A text that passes may still be too long.
        """
        max_tokens = self.config.max_position_embeddings
        n_characters = _CHARACTERS_PER_TOKEN * max_tokens
        while n_characters < len(text):
            if len(self.tokenizer.encode(text[:n_characters])) > 2 * max_tokens:
                description = f"{len(text)} characters do not fit the context of {max_tokens} tokens"
                raise UserError(
                    f"prompt: {description} (the first {n_characters} give over {2 * max_tokens}); shorten the prompt"
                )
            n_characters *= 2

    def job(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        settings: SamplingSettings | None,
        ignore_eos: bool,
        adapter: str | None,
    ) -> Job:
        """Check the arguments of `generate`, limit `max_tokens` to the context; raise the errors of `generate`."""
        require_known(adapter, self.adapters)
        if type(max_tokens) is not int or max_tokens < 0:
            raise UserError(f"generate: max_tokens must be an integer of at least 0, got {max_tokens!r}")
        ids, max_positions = self.prompt_ids(prompt), self.config.max_position_embeddings
        require_context(len(ids), 0, max_positions)
        self._require_text(self.checked_ids(ids))
        end_ids = frozenset[int]() if ignore_eos else self.tokenizer.eos_token_ids  # a chat template may add others
        if _is_conversation(prompt) and not ignore_eos:
            end_ids |= self.chats.end_ids
        return Job(ids, min(max_tokens, max_positions - len(ids) + 1), settings or SamplingSettings(), end_ids, adapter)

    def _require_text(self, ids: np.ndarray) -> None:
        """Raise UserError for placeholder ids of images: their text embeddings have no meaning."""
        for index, token_id in enumerate(ids.tolist()):
            if token_id in self._image_token_names:
                raise UserError(
                    f"generate: token {token_id} at index {index} marks an image or a video "
                    f"({self._image_token_names[token_id]} in config.json), llorch runs only the text part; remove it"
                )

    @cached_property
    def _image_token_names(self) -> dict[int, str]:
        return image_token_ids(self.weights)

    def checked_ids(self, ids: Ids) -> np.ndarray:
        """Convert token ids to int64; UserError if there are none, or for one that is no integer in the vocabulary."""
        array = np.asarray(ids)
        if array.ndim != 1 or array.size == 0:
            raise UserError(f"forward: expected a list of at least one token id, got shape {array.shape}")
        if array.dtype.kind not in "iu":
            raise UserError(f"forward: expected integer token ids, got {array.dtype}")
        is_outside = (array < 0) | (array >= self.config.vocab_size)
        if is_outside.any():
            index = int(np.argmax(is_outside))
            raise UserError(
                f"forward: token id {int(array[index])} at index {index} is outside 0 to {self.config.vocab_size - 1}"
            )
        return array.astype(np.int64)


class Model(OpenModel):
    """A model that runs in NumPy."""

    def __init__(self, weights: Weights, plan: ResidencyPlan | None = None) -> None:
        """Wrap weights that `llorch.files.open_weights` opened, with their residency plan if there is one."""
        super().__init__(weights)
        self.plan = plan
        self._adapted: dict[str, AdaptedWeights] = {}

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter, see `OpenModel.remove_adapter`."""
        super().remove_adapter(name)
        self._adapted.pop(name, None)

    def _weights_for(self, adapter: str | None) -> Weights:
        """Return the weights, or the weights with an adapter."""
        require_known(adapter, self.adapters)
        if adapter is None:
            return self.weights
        if adapter not in self._adapted:
            self._adapted[adapter] = AdaptedWeights(self.weights, self._adapters[adapter])
        return self._adapted[adapter]

    def forward(
        self,
        ids: Sequence[int] | np.ndarray,
        *,
        trace: dict[str, np.ndarray] | None = None,
        first_position: int = 0,
        cache: KVCache | None = None,
        last_only: bool = False,
        adapter: str | None = None,
    ) -> Float[np.ndarray, "rows vocab"]:
        """Compute the logits of new tokens.

        Args:
            ids: Token ids, at least one.
            trace: Filled with every stage (named array) by its trace key, such as `l0.q_rope`, if not None.
            first_position: Position of the first token, if `cache` is None.
            cache: Cache of the previous tokens; the new ones are appended.
            last_only: Compute the logits of the last token only.
            adapter: Name of the adapter; None for the base model.

        Returns:
            One row per token, or one row with `last_only`.

        Raises:
            UserError: No ids, an id out of range, too many ids for the context, or no such adapter.
        """
        weights = self._weights_for(adapter)
        cache = KVCache.of(weights, first_position=first_position) if cache is None else cache
        return self._forward(ids, weights, cache, trace=trace, last_only=last_only)

    def _forward(
        self, ids: Ids, weights: Weights, cache: KVCache, *, trace: dict[str, np.ndarray] | None = None, last_only: bool
    ) -> Float[np.ndarray, "rows vocab"]:
        """Check the ids and run the forward pass, in chunks unless there is a trace; return the logits."""
        ids = self.checked_ids(ids)
        cache.next_positions(len(ids))  # raises before any computation if the tokens do not fit
        if trace is not None:

            def keep(name: str, array: np.ndarray) -> np.ndarray:
                trace[name] = array
                return array

            return forward(ids, weights, cache, keep=keep, last_only=last_only)
        rows = []
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[start : start + PREFILL_CHUNK]
            is_skipped = last_only and start + PREFILL_CHUNK < len(ids)
            logits = forward(chunk, weights, cache, last_only=last_only)
            rows += [] if is_skipped else [logits]
        return np.concatenate(rows) if len(rows) > 1 else rows[0]

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

        Args:
            prompt: Text (tokenized with the model's special tokens), or token ids.
            messages: Conversation in place of a prompt, `[{"role": "user", "content": "Hello"}]`, rendered by the
                model's chat template. Only the template adds control tokens; in messages, their text stays text.
            max_tokens: Largest number of tokens; the context may end earlier.
            settings: Sampling settings; greedy by default.
            stop: Strings that end the answer.
            ignore_eos: Continue after an end token.
            adapter: Name of the adapter; None for the base model.

        Returns:
            Iterator of tokens with id, text and log probability, computed on demand.

        Raises:
            FormatError: The messages are invalid, or the model has no chat template for them.
            UserError: An argument is out of range, the prompt is empty or too long, or there is no such adapter.
            NonFiniteRun: The iterator raises it if numbers overflow.
        """
        source = require_one_prompt(prompt, messages)
        job = self.job(source, max_tokens=max_tokens, settings=settings, ignore_eos=ignore_eos, adapter=adapter)
        answer = Answer(self.tokenizer, end_ids=job.end_ids, stop=stop, max_tokens=job.max_tokens)
        sampled = sample_ids(self.step(adapter), job.ids, job.settings, max_tokens=job.max_tokens)
        return stream(sampled, answer)

    def step(self, adapter: str | None = None) -> Step:
        """Return a function that runs a new sequence pass by pass: new ids in, logits of the last token out.

        Args:
            adapter: Name of the adapter; None for the base model.

        Returns:
            A function with its own KV cache; it raises NonFiniteRun if numbers overflow.

        Raises:
            UserError: There is no such adapter.
        """
        weights = self._weights_for(adapter)
        cache = KVCache.of(weights)
        all_ids: list[int] = []

        @np.errstate(over="ignore", invalid="ignore")  # non-finite logits raise below
        def step(new_ids: Sequence[int]) -> np.ndarray:
            all_ids.extend(new_ids)
            logits = self._forward(new_ids, weights, cache, last_only=True)[-1]
            if not np.isfinite(logits).all():
                self._raise_non_finite(all_ids, weights)
            return logits

        return step

    def _raise_non_finite(self, ids: Sequence[int], weights: Weights) -> NoReturn:
        """Run the tokens again, and raise NonFiniteRun for the first non-finite stage."""

        def run(on_stage: StageCallback) -> None:
            def keep(name: str, array: np.ndarray) -> np.ndarray:
                on_stage(name, array)
                return array

            cache = KVCache.of(weights)
            for start in range(0, len(ids), PREFILL_CHUNK):
                forward(np.array(ids[start : start + PREFILL_CHUNK]), weights, cache, keep=keep, last_only=True)

        raise_first_non_finite(run, where=weights.path, dtype=str(np.dtype(weights.dtype)))


def require_one_prompt(prompt: str | Sequence[int] | None, messages: Sequence[Message] | None) -> Prompt:
    """Return the one of `prompt` and `messages` that is not None; UserError for both or neither."""
    if prompt is not None and messages is None:
        return prompt
    if messages is None or prompt is not None:
        raise UserError(f"generate: expected a prompt or messages, got {'neither' if messages is None else 'both'}")
    return _checked_conversation(messages)


def _is_conversation(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _checked_conversation(messages: Sequence[Any]) -> list[dict[str, object]]:
    return checked_messages(Fields({}, "generate"), "messages", list(messages))


def load(
    path_or_name: str | Path, *, numerics: Numerics = EXACT, residency: Residency = "auto", n_tokens: int = 1024
) -> Model:
    """Open a model.

    Args:
        path_or_name: A .gguf file, a Hugging Face folder, the name of a built-in model, or a model of the Hugging Face
            hub, `org/name[:QUANT][@REVISION]`, which is downloaded if it is not in the cache.
        numerics: `EXACT`, `GGML` or `SCHEME` of `llorch.ops.numerics`, or another `Numerics`, not a name. `EXACT`:
            decoded weights, no rounding of activations. `GGML`: activations rounded as in llama.cpp's CPU backend.
            `GGML_KERNELS`: the same by ggml's own functions, which are the fastest for a quantised file.
            `SCHEME`: activations rounded as the settings of a quantised Hugging Face folder say.
        residency: `decoded`: matrices are decoded to float32 once. `packed`: they are decoded at every use, with
            little more memory than the file. `auto`: decoded if that fits.
        n_tokens: Number of context tokens to reserve memory for.

    Returns:
        The model; weights are read at first use.

    Raises:
        FileNotFoundError: There is no such file, folder, built-in model or hub model.
        FormatError: The file cannot be used.
        MemoryError: The model does not fit into memory.
        NoKernels: The numerics need kernels of ggml that cannot be used here.
        TypeError: `numerics` is no `Numerics`.
    """
    return prepare(open_weights(find(path_or_name)).using(numerics), residency=residency, n_tokens=n_tokens)


def prepare(weights: Weights, *, residency: Residency = "auto", n_tokens: int = 1024) -> Model:
    """Make the model of open weights, with their numerics; arguments and errors as for `load`."""
    keep_freed_memory()
    residency_plan = plan(weights, residency, n_tokens=n_tokens)
    return Model(weights.using(packed=residency_plan.residency == "packed"), residency_plan)
