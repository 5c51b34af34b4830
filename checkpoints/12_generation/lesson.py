# %% [markdown]
# # 12 generation
#
# 35 minutes, two short functions. At the end your own code writes the same story as llama.cpp.
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's box lit](fig/where.svg)
#
# A forward pass takes token ids and gives logits. The last row predicts the next token
# ([09](../09_selected_logits/README.md)), and its largest entry is the greedy choice ([10](../10_argmax/README.md)).
# This gives one token. A loop gives a text.
#
# You may come here straight from the fast track (warm-up, 01, 01b, 07). llorch fills in the functions that you have
# not written, so the loop has a whole model to run.
#
# ## Idea
#
# The first pass runs the whole prompt. Its keys and values stay in the cache ([03](../03_kv_cache/README.md)). From
# then on the model has seen everything but one token: the one that was just chosen. So every later pass has a single
# token, and costs a fraction of the first.

# %%
import inspect

import numpy as np

import llorch
from llorch.model.cache import KVCache

story = llorch.load("story")
prompt = story.tokenizer.encode("Once upon a time")
cache = KVCache(story.config, np.float32)
new = prompt
for _ in range(5):
    row = story.forward(new, cache=cache, last_only=True)[-1]
    token = int(np.argmax(row))
    print(f"{len(new)} in, cache holds {cache.length:2}, next {story.tokenizer.token_bytes(token).decode()!r}")
    new = [token]

# %% [markdown]
# The first pass had five tokens (`Once upon a time` and the token that begins every text). Every later pass had one.
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
# and return the list. Yielding shows the text while it is written. The model is passed as a function, so this
# exercise needs Python. For a program in another language, llorch's function fills in.
#
# ```
# llorch learn check 12
# llorch learn hint 12
# ```
#
# Then, in the folder above yours:
#
# ```
# llorch run story --impl my_llama "Once upon a time"
# llorch run story "Once upon a time"                    # the reference
# ```
#
# Both print the same story, and so does llama.cpp, as the golden above shows. It uses your norms, your rotations and
# your loop, as far as you have written them. This is the end of the fast track. The other lessons replace the
# borrowed functions one by one, and the text stays the same.
#
# ## Run it

# %%
text = [*story.generate("Once upon a time", max_tokens=24)]
print("".join(token.text for token in text))
for token in text[:10]:
    print(f"{token.text!r:10} {np.exp(token.logprob):.2f}")

# %% [markdown]
# The goldens hold the texts of llama.cpp and transformers, each written with the engine's loop and cache.

# %%
from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

golden = read(goldens_folder() / "story")
near = golden.cases["near"].ids
print("prompt      ", story.tokenizer.decode(near))
for engine, output in golden.engine_outputs.items():
    print(f"{engine:13}{story.tokenizer.decode(output.greedy)}")
llorch_ids = [token.id for token in story.generate(near, max_tokens=24, ignore_eos=True)]
print("llorch      ", llorch_ids == golden.engine_outputs["llamacpp"].greedy.tolist())

# %% [markdown]
#
# ## The mistake
#
# A chat template writes the beginning token, and the tokenizer adds one, too. The prompt then starts with two of
# them. Nothing crashes, the text still reads well, and every position is off by one ([llama-cpp-python
# 1501](https://github.com/abetlen/llama-cpp-python/issues/1501) is one such report).

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["12"])["generate"]["generation-first-token-twice"]
print(inspect.getsource(wrong))
print(check_functions("12", generate=wrong))

# %% [markdown]
# In how many of the five built-in models does it show? Each wrote 24 tokens:

# %%
for name, function in typed_mistakes(BY_NUMBER["12"])["generate"].items():
    report = check_functions("12", generate=function)
    models = list(dict.fromkeys(comparison.model for comparison in report.wrong))
    print(f"{name:36} {len(models)} of 5")

# %% [markdown]
# Text is weak evidence. Three of these mistakes do not change the text of some model by a single token. So good text
# does not prove that a model is right, but the numbers of 01 to 08 do. Text does test the loop.
# (`generation-text-fed-again` ends in an error in the fifth model, whose context it fills.)
