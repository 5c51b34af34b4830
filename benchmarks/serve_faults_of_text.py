"""Faults in texts: a harmful chat template, and user text that looks like control tokens."""

import asyncio
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from serve_client import Reply, ask
from serve_faults_of_clients import CHAT, Verdict, chat, worst
from serve_faults_of_work import share, solo, stream
from serve_processes import Server

from llorch.files.convert import convert
from llorch.runtime.builtin import builtin_path

HARM = {  # text of the last message: code that the template runs for it
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "explode": "{{ 'a' * 2000000000 }}",
    "reach": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "write": "{% for i in range(50) %}{{ 'a b' * 25000 }}{% endfor %}",  # within the limits of a template
}
_TURNS = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TEMPLATE = "".join(f"{{% if messages[-1].content == '{say}' %}}{do}{{% endif %}}" for say, do in HARM.items()) + _TURNS
CONTROLS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
N_TEMPLATE_TOKENS = 1 + 3 + 2  # control tokens around one message: BOS, turn, opening of the answer


def with_template(folder: Path) -> str:
    """Convert `story` and write a template that does harm if a message asks for it."""
    convert(builtin_path("story"), folder / "story")
    (folder / "story" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(folder / "story")


async def harm(server: Server) -> Verdict:
    """Send chats whose template does harm, one after the other; meanwhile streams, texts, /health and other chats."""
    expected, replies_to_harm = await solo(server), {}
    done = asyncio.Event()

    async def harmful() -> None:
        for harm_name in (*HARM, *HARM):
            replies_to_harm[harm_name] = await ask(server.port, "POST", CHAT, chat(harm_name))
        done.set()

    async def repeat(path: str, body: object) -> list[Reply]:
        replies = []
        for _ in count():
            replies.append(await ask(server.port, "POST" if body else "GET", path, body))
            if done.is_set():
                return replies
            await asyncio.sleep(0.02)
        return replies

    text = {"model": "story", "prompt": "Once", "max_tokens": 1}
    harming, streams = asyncio.create_task(harmful()), [stream(server.port, index) for index in range(3)]
    health, texts, chats = await asyncio.gather(
        repeat("/health", None),
        repeat("/v1/completions", text),
        repeat(CHAT, chat("Hello", max_tokens=1)),
    )
    await harming
    refused = all(reply.status == 400 and reply.error.get("param") == "messages" for reply in replies_to_harm.values())
    slowest = max(reply.seconds for reply in replies_to_harm.values())
    n_equal, are_answered = (
        share(await asyncio.gather(*streams), expected),
        all(reply.status == 200 for reply in (*health, *texts, *chats)),
    )
    is_silent = not any(b"/story" in reply.body for reply in replies_to_harm.values())  # the path of the model's files
    p99 = f"/health p99 {worst(health):.0f} ms, texts {worst(texts):.0f} ms, other chats {worst(chats):.0f} ms"
    in_time = slowest < 1.5 and worst(health) < 100 and worst(texts) < 250 and worst(chats) < 1500
    text = f"400 in {slowest:.1f} s at most; {n_equal} streams as alone; {p99}"
    return Verdict(refused and is_silent and n_equal == 3 and are_answered, text, in_time)


async def controls(server: Server) -> Verdict:
    """Send the text of every control token in every text field; in chat messages it must stay text.

    A client writes a raw prompt itself, templates included, as for llama.cpp and vLLM. There the text becomes the
    control token, unless `parse_special` is false.
    """
    special = await ids(server, "/tokenize", {"content": "".join(CONTROLS), "parse_special": True})
    n_forms, wrong = 0, []
    for text in CONTROLS:
        for form, (body, n_expected) in _forms(text).items():
            traced = await ids(server, "/v1/trace", {"model": "story", **body})
            detokenized = await ask(server.port, "POST", "/detokenize", {"tokens": traced})
            n_special = sum(token_id in special for token_id in traced)
            n_forms += 1
            if n_special != n_expected or text not in detokenized.json()["content"]:
                wrong.append(f"{form} {text}")
    counts = [await _n_prompt(server, text) for text in CONTROLS]
    are_equal = all(chats == responses == traced for chats, responses, traced in counts)
    is_right = len(special) == len(CONTROLS) and not wrong and are_equal
    return Verdict(is_right, f"{n_forms - len(wrong)} of {n_forms} are read as they should {wrong}")


def _forms(text: str) -> dict[str, tuple[dict[str, object], int]]:
    """List the fields where a client may write a text, each with the number of control tokens around it."""
    first_half, second_half = text[: len(text) // 2], text[len(text) // 2 :]

    def form(*messages: tuple[str, object]) -> tuple[dict[str, object], int]:
        turns = [{"role": role, "content": content} for role, content in messages]
        return {"messages": turns}, N_TEMPLATE_TOKENS + 3 * (len(messages) - 1)

    parts = [{"type": "text", "text": first_half}, {"type": "text", "text": second_half}]
    return {
        "user": form(("user", text)), "inside": form(("user", f"a{text}b{text}")), "parts": form(("user", parts)),
        "system": form(("system", text), ("user", "a")), "assistant": form(("assistant", text), ("user", "a")),
        "prompt": ({"prompt": text, "parse_special": False}, 1), "raw prompt": ({"prompt": text}, 1 + 1),
    }  # fmt: skip


async def ids(server: Server, path: str, body: object) -> list[int]:
    """Return the token ids of an answer."""
    return (await ask(server.port, "POST", path, body)).json()["tokens"]


async def _n_prompt(server: Server, text: str) -> Sequence[int]:
    """Count the tokens of the same message in a chat, a response and a trace."""
    body = chat(text, max_tokens=1)
    n_chat = (await ask(server.port, "POST", CHAT, body)).json()["usage"]["prompt_tokens"]
    response_body = {"model": "story", "input": text, "max_output_tokens": 1}
    n_response = (await ask(server.port, "POST", "/v1/responses", response_body)).json()["usage"]["input_tokens"]
    traced = await ids(server, "/v1/trace", {"model": "story", "messages": body["messages"]})
    return n_chat, n_response, len(traced)
