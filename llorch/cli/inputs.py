"""Input of a command: a model, a prompt, token ids, a conversation."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from llorch.cli.options import refuse_both
from llorch.cli.output import say
from llorch.files import GGUFFile, SafetensorsFolder, Weights
from llorch.files.hub import find
from llorch.files.packed import has_codes
from llorch.files.tensor_names import count_parameters
from llorch.model.model import Model
from llorch.ops.compiled.ggml import NoKernels, ggml_kernels
from llorch.ops.numerics import EXACT, GGML_KERNELS, SCHEME, Numerics
from llorch.runtime.errors import FormatError, UserError, decode_utf8
from llorch.runtime.threads import is_small

SENTENCE = "Once upon a time, a small red fox found 27 shiny stones near the old river."
SPREAD = {12: 5, 66: 25}  # by number of ids, see `spread_ids`: step between stretches, coprime to the number
MOST_STDIN = 64 << 20  # bytes; stdin may have no end
IN_CHUNKS = 66  # tokens; a delta net computes 64 at once, so this many need a second chunk


def model_path(spec: str) -> Path:
    """Find the file or folder of a MODEL argument, see `llorch.files.hub.find`; print the commit of a hub repository.

    Before a download, its size is printed; llorch asks for consent on a terminal only.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # huggingface_hub reads it when it is imported
    return find(spec, consent=_agreed, report=say_once)


def _agreed(download: str) -> bool:
    """Ask for the download if a person is at the terminal; else announce it and return True."""
    if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        return click.confirm(f"{download}; download?", default=True, err=True)
    say(f"{download}; downloading")
    return True


def say_once(line: str) -> None:
    """Print a line once per command, although a command may look for its model several times."""
    printed_lines = click.get_current_context().meta.setdefault("llorch.said", set())
    if line not in printed_lines:
        printed_lines.add(line)
        say(line)


def chosen_numerics(name: str | None, kv_cache: str, kernels: str = "auto") -> Numerics:
    """Choose the arithmetic that the options ask for: exact if none does, ggml's with `kernels` of ggml."""
    if kernels == "ggml":
        if name not in (None, "ggml"):
            raise click.UsageError(f"--kernels ggml goes with --numerics ggml; they round the inputs, {name} does not")
        return Numerics("ggml", kv_cache, "ggml")  # type: ignore[arg-type] (click checked the choices)
    if kv_cache != "f32" and name != "ggml":
        raise click.UsageError("--kv-cache f16 goes with --numerics ggml; exact numerics do not round keys and values")
    return Numerics(name or "exact", kv_cache)  # type: ignore[arg-type] (click checked the choices)


def fastest_numerics(weights: Weights) -> Numerics:
    """Choose ggml's kernels for a large GGUF file with quantised matrices, exact numerics for others.

    If the kernels cannot be used, print the reason, and choose exact numerics, too.
    """
    is_quantised = any(has_codes(weights.stored_type(name)) for name, slot in weights.slots.items() if slot.multiplied)
    if not (isinstance(weights.source, GGUFFile) and is_quantised) or is_small(count_parameters(weights.config)):
        return EXACT
    try:
        weights.using(GGML_KERNELS)
    except NoKernels as error:
        say(f"note: exact numerics, which are slower than ggml's kernels: {error}")
    except FormatError:  # of a type that ggml cannot multiply
        return EXACT
    else:
        return GGML_KERNELS
    return EXACT


def describe_kernels(numerics: Numerics) -> str:
    """Name the kernels of the NumPy path that multiply stored matrices, and the arithmetic."""
    kernels = f"ggml {ggml_kernels().version}" if numerics.kernels == "ggml" else "llorch's"
    return f"kernels: {kernels}, numerics {numerics.name}"


def say_plan(model: Model) -> None:
    """Print which matrices stay packed, and their memory, unless all are F32; note a scheme without activations."""
    if model.plan is not None and model.plan.types.keys() != {"F32"}:
        say(f"{model.name}: {model.plan.describe()}")
    if model.weights.numerics == SCHEME and model.weights.quantises_weights_only:
        say(f"note: {model.name} quantises no activations, so scheme numerics equal exact numerics")


def prompt_text(prompt: str | None) -> str:
    """Return the argument; if it is absent or `-`, return stdin without its last line end.

    Otherwise stdin is not read: in a shell loop it may be the list that the loop reads.
    """
    if prompt not in (None, "-"):
        return prompt
    piped = _read_stdin() if sys.stdin is not None and (prompt == "-" or not sys.stdin.isatty()) else ""
    if not piped:
        raise click.UsageError("text: expected a prompt, got none; give it as an argument or on stdin")
    return piped.removesuffix("\n")


def _read_stdin() -> str:
    data = sys.stdin.buffer.read(MOST_STDIN + 1)
    if len(data) > MOST_STDIN:
        raise UserError(f"stdin: expected at most {MOST_STDIN} bytes of text, got more; give a part of the text")
    return _with_plain_line_ends(decode_utf8(data, "stdin"))


def stdin_lines() -> Iterator[str]:
    """Yield each line of stdin, decoded as UTF-8, as soon as it arrives; UserError for invalid UTF-8.

    The offset in the error message counts from the start of stdin.
    """
    offset = 0
    for data in iter(lambda: sys.stdin.buffer.readline(MOST_STDIN), b""):
        yield _with_plain_line_ends(decode_utf8(data, "stdin", offset=offset)).removesuffix("\n")
        offset += len(data)


def _with_plain_line_ends(text: str) -> str:
    """Turn every line end into a newline, as Python's text files do."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def choose_ids(model: Model, prompt: str | None, tokens: list[int] | None) -> tuple[list[int], str | None]:
    """Return the ids to run, and their text or None: the user's, else those of a default input, printed on stderr."""
    refuse_both(prompt, tokens)
    if tokens is not None:
        return tokens, None
    if prompt is not None:
        return model.prompt_ids(prompt), prompt
    return _default_ids(model)


def has_vocabulary(source: GGUFFile | SafetensorsFolder) -> bool:
    """Return whether a file or folder has a tokenizer, valid or not."""
    if isinstance(source, GGUFFile):
        vocabulary_type = source.metadata.get("tokenizer.ggml.model", "none")  # the file may hold any type here
        return not (isinstance(vocabulary_type, str) and vocabulary_type in ("none", "no_vocab"))
    return (source.path / "tokenizer.json").is_file()


def spread_ids(vocab_size: int, n: int = 12) -> list[int]:
    """Spread `n` distinct ids over a vocabulary: the middles of `n` equal stretches, in no monotonic order.

    There are fewer ids if the vocabulary is smaller.
    """
    stretches = [SPREAD[n] * index % n for index in range(n)]
    return list(dict.fromkeys((2 * stretch + 1) * vocab_size // (2 * n) for stretch in stretches))


def _default_ids(model: Model) -> tuple[list[int], str | None]:
    """Return ids and text of llorch's default prompt; for a model without a vocabulary `spread_ids` and None."""
    needs_chunks = model.config.delta_net is not None
    if has_vocabulary(model.weights.source):
        text, ids = SENTENCE, model.tokenizer.encode(SENTENCE)
        while needs_chunks and len(ids) < IN_CHUNKS:
            text = f"{text} {SENTENCE}"
            ids = model.tokenizer.encode(text)
        say(f"input: {text!r}")
        return ids, text
    token_ids = spread_ids(model.config.vocab_size, IN_CHUNKS if needs_chunks else 12)
    say(f"input: token ids {','.join(map(str, token_ids))} (the model has no vocabulary)")
    return token_ids, None


def conversation(chat: str | None, system: str | None, history: Path | None) -> list[dict[str, object]] | None:
    """Build a conversation; `chat`: the user's message, `-` reads it from stdin. None without `chat` and `history`."""
    if chat is None and history is None:
        if system is not None:
            raise click.UsageError("--system goes with --chat or --history")
        return None
    messages = earlier_messages(system, history)
    return messages if chat is None else [*messages, {"role": "user", "content": prompt_text(chat)}]


def earlier_messages(system: str | None, history: Path | None) -> list[dict[str, object]]:
    """Read the messages of a file, after the system message if there is one."""
    messages = [] if history is None else read_history(history)
    if system is not None and messages and messages[0]["role"] == "system":
        raise click.UsageError(f"--system: {history} already begins with a system message; leave out --system")
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def read_history(path: Path) -> list[dict[str, object]]:
    """Read the messages of a file: a JSON list, or one message on each line."""
    from llorch.files.mapped import read_regular
    from llorch.files.strict_json import parse_json
    from llorch.files.tokenizer.messages import checked_messages
    from llorch.runtime.fields import Fields

    data = read_regular(path, limit=MOST_STDIN)
    if data.lstrip().startswith(b"["):
        value = parse_json(data, what="the history", path=path)
    else:
        lines = enumerate(data.splitlines(), start=1)
        value = [parse_json(line, what="the line", path=f"{path}:{row}") for row, line in lines if line.strip()]
    return checked_messages(Fields({}, path), "history", value)
