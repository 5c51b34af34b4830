"""One served model: its names and limits, and the conversion of requests into jobs of the engine."""

import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llorch.apps.serve.api_errors import ApiError
from llorch.apps.serve.engine import Engine
from llorch.apps.serve.grammar import guide_for
from llorch.apps.serve.requests import AnswerForm
from llorch.model.generate import Guide, Job
from llorch.model.model import Model
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.errors import FormatError

if TYPE_CHECKING:
    from llorch.pytorch.model import TorchModel

MAX_TEXT = 1 << 20  # bytes of text per request
MAX_SEED = 1 << 31
Messages = Sequence[dict[str, object]]
Variables = Mapping[str, object] | None  # that a chat template reads


class Service:
    """One model, its adapters and its engine."""

    def __init__(
        self, model: "Model | TorchModel", engine: Engine, *, context: int, timeout: float, version: str
    ) -> None:
        """Serve a model; `context` limits prompt and answer together, in tokens, `timeout` a request, in seconds."""
        self.model, self.engine, self.timeout = model, engine, timeout
        self.context = min(context, model.config.max_position_embeddings)
        self.created, self.version = int(time.time()), version
        self.fingerprint = system_fingerprint(Path(model.weights.path), version)
        self.preparing = ThreadPoolExecutor(1, thread_name_prefix="llorch-prompts")
        self.writing = ThreadPoolExecutor(1, thread_name_prefix="llorch-chats")  # a slow template delays no raw prompt
        self.has_template = model.chats.has_template
        engine.metrics.watch(lambda: engine.n_running, lambda: engine.n_waiting)

    @property
    def names(self) -> dict[str, str | None]:
        """Model names of requests, each with its adapter."""
        base = self.model.name
        return {base: None} | {f"{base}:{adapter}": adapter for adapter in self.model.adapters}

    def reply_fields(self, prefix: str, model: str) -> dict[str, Any]:
        """Make the fields that all chunks of a reply share; `prefix` begins its id."""
        reply_id, now = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        return {"id": reply_id, "created": now, "model": model, "system_fingerprint": self.fingerprint}

    def adapter(self, name: str) -> str | None:
        """Find the adapter of a model name; raise ApiError for an unknown name."""
        names = self.names
        if name not in names:
            raise ApiError(404, f"model: expected one of {', '.join(names)}, got another name", param="model",
                          code="model_not_found")  # fmt: skip
        return names[name]

    def chat_ids(self, messages: Messages, *, param: str = "messages", variables: Variables = None) -> list[int]:
        """Encode a conversation up to the answer; MAX_TEXT also limits the template's output."""
        require_short(*(str(message.get("content") or "") for message in messages), param=param)
        with self._field_errors(param):
            conversation = self.model.chats.spoken(messages, variables=variables)
            require_short(conversation.text, param=param)
            return self.model.chats.encoded(conversation)

    def unrendered_keys(
        self, messages: Messages, *, param: str = "messages", first: int = 0, variables: Variables = None
    ) -> list[str]:
        """List the keys of messages, and the variables, that the model's chat template does not read.

        The request has the messages in the field `param`; `first` is the index of the client's first message.
        """
        chats = self.model.chats
        with self._field_errors(param):
            unrendered_keys = chats.unwritten(messages, variables=variables)
        unread = [name for name, value in (variables or {}).items() if value is not None]
        return [f"{param}.{index - first}.{key}" for index, key in unrendered_keys] + [
            f"chat_template_kwargs.{name}" for name in unread if not chats.template_mentions(name)
        ]

    def chat_end_ids(self, *, param: str = "messages") -> frozenset[int]:
        """Return the token ids that end an answer in a conversation, in addition to EOS."""
        with self._field_errors(param):
            return self.model.chats.end_ids

    def text_ids(self, text: str, *, parse_special: bool | None = None, add_special: bool | None = None) -> list[int]:
        """Encode a raw prompt; by default control tokens are parsed, because the client has applied the template.

        Source: llama.cpp tools/server/server-common.cpp, `tokenize_input_prompts`; vLLM's /v1/completions.
        """
        require_short(text, param="prompt")
        with self._field_errors("prompt"):
            return self.model.tokenizer.encode(
                text, parse_special=parse_special is not False, add_special=add_special is not False
            )

    @contextmanager
    def _field_errors(self, param: str) -> Iterator[None]:
        """Turn errors of a field into ApiError 400, without the path of the model's files."""
        try:
            yield
        except FormatError as error:
            text = error.message.replace(str(self.model.weights.path), self.model.name)
            raise ApiError(400, text, param=param) from None
        except ValueError as error:
            raise ApiError(400, str(error), param=param) from None

    def job(
        self,
        ids: Sequence[int],
        settings: SamplingSettings,
        *,
        param: str,
        max_tokens: int | None,
        adapter: str | None,
        end_ids: frozenset[int] = frozenset(),
        n_top: int = 0,
        form: AnswerForm | None = None,
    ) -> Job:
        """Make a job; raise ApiError if the prompt (field `param`) is empty, too long or has unknown token ids."""
        room = self.context - len(ids) + 1  # + 1: the last token of an answer needs no place in the cache
        if room < 1:
            text = f"{param}: {len(ids)} tokens do not fit the context of {self.context} tokens; shorten the prompt"
            raise ApiError(400, text, param=param, code="context_length_exceeded")
        try:
            limit = min(max_tokens or room, room)
            job = self.model.job(list(ids), max_tokens=limit, settings=settings, ignore_eos=False, adapter=adapter)
        except ValueError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None
        job = replace(job, end_ids=job.end_ids | end_ids, n_top=n_top)
        return job if form is None else replace(job, guide=self._guide(form, job.end_ids))

    def _guide(self, form: AnswerForm, end_ids: frozenset[int]) -> Guide:
        vocab_size = self.model.config.vocab_size
        try:
            return guide_for(self.model.tokenizer, form.schema, vocab_size=vocab_size, end_ids=end_ids)
        except ValueError as error:
            text = error.message if isinstance(error, FormatError) else str(error)
            raise ApiError(400, f"{form.param}: {text}", param=form.param) from None


def first_seed(seed: int | None) -> int:
    """Return the requested seed, or a random seed."""
    return secrets.randbelow(MAX_SEED) if seed is None else seed


def require_short(*texts: str, param: str) -> None:
    """Raise ApiError for texts over MAX_TEXT in sum, before they are tokenized."""
    n_bytes = sum(len(text) if text.isascii() else len(text.encode("utf-8", "replace")) for text in texts)
    if n_bytes > MAX_TEXT:
        text = f"{param}: {n_bytes} bytes of text, at most {MAX_TEXT} are read"
        raise ApiError(400, text, param=param, code="context_length_exceeded")


def system_fingerprint(path: Path, version: str) -> str:
    """Hash llorch's version, and the names, sizes and modification times of the weight files."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, stat.st_size, stat.st_mtime_ns) for file in files if (stat := file.stat())]
    return "fp_" + hashlib.sha256(repr((version, stats)).encode()).hexdigest()[:12]
