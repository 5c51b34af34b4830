"""Where turns of the assistant lie in a rendered conversation."""

import pytest
from chat_models import CHATML, LLAMA_3, NO_END, OPENS_WITH_THINKING, THINKING

from llorch.errors import FormatError
from llorch.tokenizer.chat import ChatTemplate
from llorch.tokenizer.conversation import Breaker, Conversation
from llorch.train.data.encode import Rendered, render_turns
from llorch.train.data.formats import Chat

CONTROLS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>")


def chat(*texts: str, tools: list[object] | None = None, system: str | None = None) -> Chat:
    """Turns of a user and the assistant in turn."""
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    first = [{"role": "system", "content": system}] if system is not None else []
    learned = [len(first) + place for place in range(1, len(texts), 2)]
    return Chat([*first, *messages], tools, learned)


def conversation(found: Chat, template: str) -> Conversation:
    written = ChatTemplate(template, variables={"bos_token": "<s>"})
    return Conversation(found.messages, found.tools, written, Breaker(CONTROLS))


def turns(found: Chat, template: str) -> list[Rendered]:
    return render_turns(found.learned, conversation(found, template))


def learned(rendered: Rendered) -> list[str]:
    return [rendered.text[first:last] for first, last in rendered.spans]


def test_words_of_the_user_that_equal_those_of_the_assistant_are_not_learned():
    (found,) = turns(chat("same", "same", "same", "same"), LLAMA_3)
    assert learned(found) == ["same<|eot_id|>"] * 2
    assert [found.text[:first].count("same") for first, _ in found.spans] == [1, 3]


def test_only_the_turns_that_are_asked_for_are_spans():
    found = chat("q", "one", "q", "two", "q", "three")
    assert [learned(one) for one in render_turns([3], conversation(found, CHATML))] == [["two<|im_end|>\n"]]
    (rendered,) = render_turns([1, 5], conversation(found, CHATML))
    assert learned(rendered) == ["one<|im_end|>\n", "three<|im_end|>\n"]


def test_what_follows_the_last_turn_is_left_out():
    found = chat("q", "a", "and?")
    assert turns(found, CHATML)[0].text.endswith("a<|im_end|>\n")


def test_a_template_that_writes_earlier_turns_differently_gives_an_example_for_each():
    found = turns(chat("q", "<think>1</think>one", "q", "<think>2</think>two"), THINKING)
    assert [learned(one) for one in found] == [["<think>1</think>one<|im_end|>\n"], ["<think>2</think>two<|im_end|>\n"]]
    # The second sees the first as the model would: without its thinking.
    assert found[1].text.startswith("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n")
    (whole,) = turns(chat("q", "one", "q", "<think>2</think>two"), THINKING)
    assert learned(whole) == ["one<|im_end|>\n", "<think>2</think>two<|im_end|>\n"]


def test_a_turn_that_does_not_begin_as_the_template_opens_it_is_refused():
    with pytest.raises(
        FormatError, match=r"messages\[1\] is not written as .*: expected '<think>\\n', got 'a<\|im_end"
    ):
        turns(chat("q", "a"), OPENS_WITH_THINKING)
    (found,) = turns(chat("q", "<think>\nhm</think>a"), OPENS_WITH_THINKING)
    assert learned(found) == ["hm</think>a<|im_end|>\n"]


def test_a_template_that_ignores_the_opening_of_a_turn_still_has_spans():
    bare = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert learned(turns(chat("q", "a", "q", "b"), bare)[0]) == ["[a]", "[b]"]


def test_tools_and_their_answers_are_given_and_calls_learned():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "a"},
    ]
    (found,) = turns(Chat(messages, [{"name": "f"}], [1, 3]), CHATML)
    assert found.text.startswith('<|im_start|>system\n{"name": "f"}\n<|im_end|>\n<|im_start|>user')
    assert learned(found) == [
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n',
        "a<|im_end|>\n",
    ]


def test_control_tokens_of_users_are_inert_wherever_they_stand():
    tools: list[object] = [{"d": "<|im_start|>"}]
    (found,) = turns(chat("a<|im_end|>b", "c<|im_end|>d", system="<|eot_id|>", tools=tools), CHATML)
    assert learned(found) == ["c<|im_end|>d<|im_end|>\n"]
    assert [found.text[place - 1 : place + 5] for place in found.inert] == ["<|im_s", "<|eot_", "<|im_e", "<|im_e"]
    (bare,) = turns(chat("q", "a"), NO_END)
    assert (bare.text, bare.inert) == ("user:\nq\nassistant:\na\n", [])


def test_a_conversation_that_the_template_cannot_begin_is_refused():
    with pytest.raises(FormatError, match="the chat template refuses this"):
        turns(Chat([{"role": "assistant", "content": "a"}], None, [0]), "{{ messages[0].content }}")
