"""Faults in the texts themselves: a chat template that means harm, and words of users that look like control tokens."""

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

HARM = {  # what the last message says, and what the template then does
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "explode": "{{ 'a' * 2000000000 }}",
    "reach": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "write": "{% for i in range(50) %}{{ 'a b' * 25000 }}{% endfor %}",  # within all that a template may take
}
_TURNS = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TEMPLATE = "".join(f"{{% if messages[-1].content == '{say}' %}}{do}{{% endif %}}" for say, do in HARM.items()) + _TURNS
CONTROLS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
OF_TEMPLATE = 1 + 3 + 2  # control tokens that it writes around one message: begin, turn, what opens the answer


def with_template(folder: Path) -> str:
    """Convert `story` and write a template that does harm where a message asks for it."""
    convert(builtin_path("story"), folder / "story")
    (folder / "story" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(folder / "story")


async def harm(server: Server) -> Verdict:
    """Send chats whose template does harm, one after the other; meanwhile streams, texts, /health, and other chats."""
    alone, told = await solo(server), {}
    done = asyncio.Event()

    async def harmful() -> None:
        for what in (*HARM, *HARM):
            told[what] = await ask(server.port, "POST", CHAT, chat(what))
        done.set()

    async def meanwhile(path: str, body: object) -> list[Reply]:
        replies = []
        for _ in count():
            replies.append(await ask(server.port, "POST" if body else "GET", path, body))
            if done.is_set():
                return replies
            await asyncio.sleep(0.02)
        return replies

    text = {"model": "story", "prompt": "Once", "max_tokens": 1}
    harming, streams = asyncio.create_task(harmful()), [stream(server.port, i) for i in range(3)]
    health, texts, chats = await asyncio.gather(
        meanwhile("/health", None),
        meanwhile("/v1/completions", text),
        meanwhile(CHAT, chat("Hello", max_tokens=1)),
    )
    await harming
    refused = all(reply.status == 400 and reply.error.get("param") == "messages" for reply in told.values())
    slowest = max(reply.seconds for reply in told.values())
    same, fine = (
        share(await asyncio.gather(*streams), alone),
        all(reply.status == 200 for reply in (*health, *texts, *chats)),
    )
    silent = not any(b"/story" in reply.body for reply in told.values())  # where the model's files lie
    p99 = f"/health p99 {worst(health):.0f} ms, texts {worst(texts):.0f} ms, other chats {worst(chats):.0f} ms"
    in_time = slowest < 1.5 and worst(health) < 100 and worst(texts) < 250 and worst(chats) < 1500
    text = f"400 in {slowest:.1f} s at most; {same} streams as alone; {p99}"
    return Verdict(refused and silent and same == 3 and fine, text, in_time)


async def controls(server: Server) -> Verdict:
    """Send the text of every control token in every place for text; in the words of a chat it must stay text.

    A client writes a raw prompt itself, templates included, as for llama.cpp and vLLM. There the text becomes the
    control token, unless `parse_special` is false.
    """
    special = await ids(server, "/tokenize", {"content": "".join(CONTROLS), "parse_special": True})
    n_forms, wrong = 0, []
    for text in CONTROLS:
        for form, (body, n_own) in _forms(text).items():
            traced = await ids(server, "/v1/trace", {"model": "story", **body})
            said = await ask(server.port, "POST", "/detokenize", {"tokens": traced})
            n_there = sum(one in special for one in traced)
            n_forms += 1
            if n_there != n_own or text not in said.json()["content"]:
                wrong.append(f"{form} {text}")
    counted = [await _n_prompt(server, text) for text in CONTROLS]
    same = all(chats == responses == traced for chats, responses, traced in counted)
    right = len(special) == len(CONTROLS) and not wrong and same
    return Verdict(right, f"{n_forms - len(wrong)} of {n_forms} are read as they should {wrong}")


def _forms(text: str) -> dict[str, tuple[dict[str, object], int]]:
    """List the places where a client may write a text, each with the number of control tokens around it."""
    half, rest = text[: len(text) // 2], text[len(text) // 2 :]

    def said(*messages: tuple[str, object]) -> tuple[dict[str, object], int]:
        turns = [{"role": role, "content": content} for role, content in messages]
        return {"messages": turns}, OF_TEMPLATE + 3 * (len(messages) - 1)

    parts = [{"type": "text", "text": half}, {"type": "text", "text": rest}]
    return {
        "user": said(("user", text)), "inside": said(("user", f"a{text}b{text}")), "parts": said(("user", parts)),
        "system": said(("system", text), ("user", "a")), "assistant": said(("assistant", text), ("user", "a")),
        "prompt": ({"prompt": text, "parse_special": False}, 1), "raw prompt": ({"prompt": text}, 1 + 1),
    }  # fmt: skip


async def ids(server: Server, path: str, body: object) -> list[int]:
    """Return the token ids of an answer."""
    return (await ask(server.port, "POST", path, body)).json()["tokens"]


async def _n_prompt(server: Server, text: str) -> Sequence[int]:
    """Count the tokens of the same message in a chat, a response and a trace."""
    asked = chat(text, max_tokens=1)
    of_chat = (await ask(server.port, "POST", CHAT, asked)).json()["usage"]["prompt_tokens"]
    body = {"model": "story", "input": text, "max_output_tokens": 1}
    of_response = (await ask(server.port, "POST", "/v1/responses", body)).json()["usage"]["input_tokens"]
    traced = await ids(server, "/v1/trace", {"model": "story", "messages": asked["messages"]})
    return of_chat, of_response, len(traced)
