"""A model as it is served: its names, its limits, and how what a client writes becomes work of the engine."""

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

MAX_TEXT = 1 << 20  # bytes of the text of one request
MAX_SEED = 1 << 31
Messages = Sequence[dict[str, object]]
Variables = Mapping[str, object] | None  # of a chat template


class Service:
    """One model, its adapters and its engine."""

    def __init__(
        self, model: "Model | TorchModel", engine: Engine, *, context: int, timeout: float, version: str
    ) -> None:
        """Serve a model; prompt and answer have `context` tokens together, a request `timeout` seconds."""
        self.model, self.engine, self.timeout = model, engine, timeout
        self.context = min(context, model.config.max_position_embeddings)
        self.created, self.version = int(time.time()), version
        self.fingerprint = system_fingerprint(Path(model.weights.path), version)
        self.preparing = ThreadPoolExecutor(1, thread_name_prefix="llorch-prompts")
        self.writing = ThreadPoolExecutor(1, thread_name_prefix="llorch-chats")  # apart: templates may take their time
        self.has_template = model.chats.has_template
        engine.metrics.watch(lambda: engine.n_running, lambda: engine.n_waiting)

    @property
    def names(self) -> dict[str, str | None]:
        """Names that a request may use for the model, each with the adapter that it means."""
        base = self.model.name
        return {base: None} | {f"{base}:{adapter}": adapter for adapter in self.model.adapters}

    def reply_fields(self, prefix: str, model: str) -> dict[str, Any]:
        """Make the fields that all parts of a reply have; `prefix` begins its id."""
        reply_id, now = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        return {"id": reply_id, "created": now, "model": model, "system_fingerprint": self.fingerprint}

    def adapter(self, name: str) -> str | None:
        """Find the adapter of a model name; ApiError for an unknown name."""
        names = self.names
        if name not in names:
            raise ApiError(404, f"model: expected one of {', '.join(names)}, got another name", param="model",
                          code="model_not_found")  # fmt: skip
        return names[name]

    def chat_ids(self, messages: Messages, *, param: str = "messages", variables: Variables = None) -> list[int]:
        """Encode a conversation up to the answer; a template may not write more than a client may."""
        require_short(*(str(message.get("content") or "") for message in messages), param=param)
        with self._refused_for(param):
            written = self.model.chats.spoken(messages, variables=variables)
            require_short(written.text, param=param)
            return self.model.chats.encoded(written)

    def unwritten_keys(
        self, messages: Messages, *, param: str = "messages", first: int = 0, variables: Variables = None
    ) -> list[str]:
        """Name the keys of messages and the variables that the model's template does not read.

        The messages are those of the field `param`, which begin at `first`.
        """
        chats = self.model.chats
        with self._refused_for(param):
            found = chats.unwritten(messages, variables=variables)
        unread = [name for name, value in (variables or {}).items() if value is not None]
        return [f"{param}.{place - first}.{key}" for place, key in found] + [
            f"chat_template_kwargs.{name}" for name in unread if not chats.template_mentions(name)
        ]

    def chat_end_ids(self, *, param: str = "messages") -> frozenset[int]:
        """List the ids that end an answer of a conversation, beside end tokens."""
        with self._refused_for(param):
            return self.model.chats.end_ids

    def text_ids(self, text: str, *, parse_special: bool | None = None, add_special: bool | None = None) -> list[int]:
        """Encode a raw prompt; control tokens in it count by default, because its client has written the template.

        Source: llama.cpp tools/server/server-common.cpp, `tokenize_input_prompts`; vLLM's /v1/completions.
        """
        require_short(text, param="prompt")
        with self._refused_for("prompt"):
            return self.model.tokenizer.encode(
                text, parse_special=parse_special is not False, add_special=add_special is not False
            )

    @contextmanager
    def _refused_for(self, param: str) -> Iterator[None]:
        """Answer 400 for a field that cannot be read, without the path of the model's files."""
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
        """Make a job of the engine; ApiError if the prompt (field `param`) is empty, too long or has foreign ids."""
        room = self.context - len(ids) + 1
        if room < 1:
            text = f"{param}: {len(ids)} tokens do not fit the context of {self.context} tokens; shorten the prompt"
            raise ApiError(400, text, param=param, code="context_length_exceeded")
        try:
            most = min(max_tokens or room, room)
            job = self.model.job(list(ids), max_tokens=most, settings=settings, ignore_eos=False, adapter=adapter)
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
    """Return the seed that was asked for, or a random one."""
    return secrets.randbelow(MAX_SEED) if seed is None else seed


def require_short(*texts: str, param: str) -> None:
    """Refuse a long text before it is tokenized."""
    n_bytes = sum(len(text) if text.isascii() else len(text.encode("utf-8", "replace")) for text in texts)
    if n_bytes > MAX_TEXT:
        text = f"{param}: {n_bytes} bytes of text, at most {MAX_TEXT} are read"
        raise ApiError(400, text, param=param, code="context_length_exceeded")


def system_fingerprint(path: Path, version: str) -> str:
    """Hash the facts that the disk knows of the weights' files, and llorch's version."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, stat.st_size, stat.st_mtime_ns) for file in files if (stat := file.stat())]
    return "fp_" + hashlib.sha256(repr((version, stats)).encode()).hexdigest()[:12]
