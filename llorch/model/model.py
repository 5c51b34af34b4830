"""A model ready to run: weights, tokenizer, and the forward pass with its boundary checks."""

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
from llorch.files.opening import ids_of_images
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
from llorch.model.generate import Answer, Job, Look, Step, Token, name_first_stage, sample_ids, stream
from llorch.ops.numerics import EXACT, Numerics
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.errors import UserError
from llorch.runtime.fields import Fields
from llorch.runtime.memory import keep_freed_memory

Ids = Sequence[int] | np.ndarray
Prompt = str | Sequence[int] | Sequence[Message]
_CHARACTERS_PER_TOKEN = 4  # of English; most texts of so many fit, and are tokenized once
PREFILL_CHUNK = 512  # tokens per pass of a long prompt: bounds the memory of the attention scores


class OpenModel:
    """Weights and tokenizer of one file or folder, whichever backend runs them."""

    def __init__(self, weights: Weights) -> None:
        """Wrap weights that `llorch.files.open_weights` opened."""
        self.weights = weights
        self._adapters: dict[str, Adapter] = {}

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that were added."""
        return list(self._adapters)

    def add_adapter(self, name: str, adapter: Adapter | str | Path, *, any_base: bool = False) -> str:
        """Put an adapter beside the weights, which stay as they are; a request uses it by its name.

        Args:
            name: What it is called from now on.
            adapter: A PEFT directory, a LoRA GGUF file, or an adapter in memory.
            any_base: Take one that was made for another base of the same shapes.

        Returns:
            What is known of its base, in a sentence.

        Raises:
            FileNotFoundError: Nothing has this path.
            FormatError: The file cannot be used with this model, or BaseMismatch.
            ValueError: The name is taken or unusable, or the adapter is for another model.
        """
        require_free(name, self.adapters)
        made, known = adapter_for(self.weights, adapter, any_base=any_base)
        require_fits(name, made, self.config)
        self._adapters[name] = made
        return known

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; what is being generated with it goes on.

        Args:
            name: Which.

        Raises:
            ValueError: There is none of this name.
        """
        require_known(name, self.adapters)
        del self._adapters[name]

    @property
    def config(self) -> ModelConfig:
        """Hyperparameters of the model."""
        return self.weights.config

    @property
    def name(self) -> str:
        """The file's name without its ending, or the folder's name; of a folder of the hub org/name."""
        return name_of(Path(self.weights.path))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; read on first use.

        Raises:
            FormatError: The file has none, or one that llorch cannot reproduce.
        """
        source = self.weights.source
        if isinstance(source, GGUFFile):
            return Tokenizer.from_gguf(source)
        return Tokenizer.from_huggingface(Path(self.weights.path))

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name, `default` for the unnamed one; empty without any.

        Raises:
            FormatError: What is there is no text.
        """
        source = self.weights.source
        if isinstance(source, GGUFFile):
            return templates_of_metadata(source.metadata, source.path)
        return read_templates(Path(self.weights.path))

    @cached_property
    def chats(self) -> Chats:
        """Chat format of the model; its template is checked when the first conversation comes."""
        return Chats(lambda: self.chat_templates, self.tokenizer, path=self.weights.path)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Encode a text with special tokens, or a conversation; UserError for one that is far too long. Ids stay."""
        if isinstance(prompt, str):
            self.require_fits(prompt)
            return self.tokenizer.encode(prompt)
        if _is_conversation(prompt):
            written = self.chats.written(_checked_conversation(prompt))
            self.require_fits(written.text)
            return self.chats.encoded(written)
        return list(prompt)  # type: ignore[arg-type] (ids)

    def require_fits(self, text: str) -> None:
        """Refuse (ValueError) a text whose beginning alone has twice the tokens of the context.

        Only as much of the text is tokenized as is needed to know. Twice, because the last tokens of a part may be
        others in the whole.
        """
        room = self.config.max_position_embeddings
        n_characters = _CHARACTERS_PER_TOKEN * room
        while n_characters < len(text):
            if len(self.tokenizer.encode(text[:n_characters])) > 2 * room:
                message = f"{len(text)} characters do not fit the context of {room} tokens"
                raise UserError(
                    f"prompt: {message} (the first {n_characters} give over {2 * room}); shorten the prompt"
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
        """Check what `generate` is asked for, and cut `max_tokens` to the context; raises as `generate` does."""
        require_known(adapter, self.adapters)
        if type(max_tokens) is not int or max_tokens < 0:
            raise UserError(f"generate: max_tokens must be an integer of at least 0, got {max_tokens!r}")
        ids, room = self.prompt_ids(prompt), self.config.max_position_embeddings
        require_context(len(ids), 0, room)
        self._require_text(self.checked_ids(ids))
        end_ids = frozenset[int]() if ignore_eos else self.tokenizer.eos_token_ids
        if _is_conversation(prompt) and not ignore_eos:
            end_ids |= self.chats.end_ids
        return Job(ids, min(max_tokens, room - len(ids) + 1), settings or SamplingSettings(), end_ids, adapter)

    def _require_text(self, ids: np.ndarray) -> None:
        """Refuse ids (ValueError) that stand for an image: what the text part embeds them as means nothing."""
        for at, token_id in enumerate(ids.tolist()):
            if token_id in self._ids_of_images:
                raise UserError(
                    f"generate: token {token_id} at index {at} marks an image or a video "
                    f"({self._ids_of_images[token_id]} in config.json), llorch runs only the text part; remove it"
                )

    @cached_property
    def _ids_of_images(self) -> dict[int, str]:
        return ids_of_images(self.weights)

    def checked_ids(self, ids: Ids) -> np.ndarray:
        """Convert token ids to int64; ValueError if there are none, or one is out of range."""
        array = np.asarray(ids)
        if array.ndim != 1 or array.size == 0:
            raise UserError(f"forward: expected a list of at least one token id, got shape {array.shape}")
        if array.dtype.kind not in "iu":
            raise UserError(f"forward: expected integer token ids, got {array.dtype}")
        outside = (array < 0) | (array >= self.config.vocab_size)
        if outside.any():
            at = int(np.argmax(outside))
            raise UserError(
                f"forward: token id {int(array[at])} at index {at} is outside 0 to {self.config.vocab_size - 1}"
            )
        return array.astype(np.int64)


class Model(OpenModel):
    """A model that runs in NumPy."""

    def __init__(self, weights: Weights, plan: ResidencyPlan | None = None) -> None:
        """Wrap weights that `llorch.files.open_weights` opened, and the plan of where they lie, if there is one."""
        super().__init__(weights)
        self.plan = plan
        self._adapted: dict[str, AdaptedWeights] = {}

    def remove_adapter(self, name: str) -> None:
        """See `OpenModel.remove_adapter`."""
        super().remove_adapter(name)
        self._adapted.pop(name, None)

    def _weights_for(self, adapter: str | None) -> Weights:
        """Return the weights, with an adapter beside them if one is wanted."""
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
        """Compute the logits of some tokens.

        Args:
            ids: Token ids, at least one.
            trace: Filled with every stage by name, when given.
            first_position: Position of the first token, when no cache is given.
            cache: Tokens before these; the new ones are appended.
            last_only: Logits of the last token only.
            adapter: Which adapter to use; None runs the base alone.

        Returns:
            One row per token, or one.

        Raises:
            ValueError: An id is out of range, there is none, they do not fit the context, or no such adapter was added.
        """
        weights = self._weights_for(adapter)
        cache = KVCache.of(weights, first_position=first_position) if cache is None else cache
        return self._forward(ids, weights, cache, trace=trace, last_only=last_only)

    def _forward(
        self, ids: Ids, weights: Weights, cache: KVCache, *, trace: dict[str, np.ndarray] | None = None, last_only: bool
    ) -> Float[np.ndarray, "rows vocab"]:
        """Check the ids, run the forward pass with some weights, and return the logits."""
        ids = self.checked_ids(ids)
        cache.next_positions(len(ids))  # refuses what does not fit before any work is done
        if trace is not None:

            def keep(name: str, array: np.ndarray) -> np.ndarray:
                trace[name] = array
                return array

            return forward(ids, weights, cache, keep=keep, last_only=last_only)
        rows = []
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[start : start + PREFILL_CHUNK]
            unseen = last_only and start + PREFILL_CHUNK < len(ids)
            logits = forward(chunk, weights, cache, last_only=last_only)
            rows += [] if unseen else [logits]
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
            prompt: Text (tokenized with the model's special tokens), or ids as they are.
            messages: Instead of a prompt a conversation, `[{"role": "user", "content": "Hello"}]`, which the model's
                chat template writes. Control tokens are those of the template; in the messages their text stays text.
            max_tokens: At most so many; the context may end sooner.
            settings: How to sample; greedy by default.
            stop: Strings that end the text.
            ignore_eos: Go on after an end token.
            adapter: Which adapter to use; None runs the base alone.

        Returns:
            Tokens with id, text and log probability, computed as they are taken.

        Raises:
            FormatError: The messages are none, or the model has no chat template for them.
            ValueError: An argument is out of range, the prompt is empty or does not fit the context, or no such adapter
                was added.
            NonFiniteRun: While tokens are taken: numbers overflow.
        """
        job = self.job(
            given(prompt, messages), max_tokens=max_tokens, settings=settings, ignore_eos=ignore_eos, adapter=adapter
        )
        answer = Answer(self.tokenizer, end_ids=job.end_ids, stop=stop, max_tokens=job.max_tokens)
        sampled = sample_ids(self.step(adapter), job.ids, job.settings, max_tokens=job.max_tokens)
        return stream(sampled, answer)

    def step(self, adapter: str | None = None) -> Step:
        """Make a function that runs one sequence from its first token on: new ids in, logits of the last one out.

        Args:
            adapter: Which adapter to use; None runs the base alone.

        Returns:
            A function that remembers what it was given; NonFiniteRun where numbers overflow.

        Raises:
            ValueError: No such adapter was added.
        """
        weights = self._weights_for(adapter)
        cache = KVCache.of(weights)
        seen: list[int] = []

        @np.errstate(over="ignore", invalid="ignore")  # what is not finite is refused below
        def step(new: Sequence[int]) -> np.ndarray:
            seen.extend(new)
            logits = self._forward(new, weights, cache, last_only=True)[-1]
            if not np.isfinite(logits).all():
                self._name_non_finite(seen, weights)
            return logits

        return step

    def _name_non_finite(self, ids: Sequence[int], weights: Weights) -> NoReturn:
        """Refuse a run that is not finite, see `name_first_stage`."""

        def run(look: Look) -> None:
            def keep(name: str, array: np.ndarray) -> np.ndarray:
                look(name, array)
                return array

            cache = KVCache.of(weights)
            for start in range(0, len(ids), PREFILL_CHUNK):
                forward(np.array(ids[start : start + PREFILL_CHUNK]), weights, cache, keep=keep, last_only=True)

        name_first_stage(run, where=weights.path, dtype=str(np.dtype(weights.dtype)))


def given(prompt: str | Sequence[int] | None, messages: Sequence[Message] | None) -> Prompt:
    """Pick the one of both that was given, see `Model.generate`; ValueError for both or neither."""
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
        path_or_name: A .gguf file, a Hugging Face folder, the name of a built-in model, or one of the Hugging Face
            hub, `org/name[:QUANT][@REVISION]`, which is downloaded where it is not in the cache.
        numerics: `EXACT`, `GGML` or `SCHEME` of `llorch.ops.numerics`, or another `Numerics`, not a name. `EXACT`: what
            the weights mean. `GGML`: with activations rounded as llama.cpp's CPU path does. `SCHEME`: with activations
            rounded as the settings of a quantised Hugging Face folder say.
        residency: `decoded`: matrices are decoded to float32 once. `packed`: at every use, which needs little more
            memory than the file. `auto`: decoded if that fits.
        n_tokens: Tokens of context to keep memory for.

    Returns:
        The model; weights are read when they are first needed.

    Raises:
        FileNotFoundError: There is no such file, folder, built-in model or model of the hub.
        FormatError: The file cannot be used.
        MemoryError: The model would not fit.
        TypeError: `numerics` is no `Numerics`.
    """
    keep_freed_memory()
    weights = open_weights(find(path_or_name)).using(numerics)
    chosen = plan(weights, residency, n_tokens=n_tokens)
    return Model(weights.using(packed=chosen.residency == "packed"), chosen)
