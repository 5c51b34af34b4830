# %% [markdown]
# # 00 foundation
#
# This page has two lessons: the warm-up, which opens the course, and "Files and tokens", which is optional and comes
# after [12](../12_generation/README.md).
#
# ## Warm-up
#
# Two minutes, one wrong constant. Make your folder and check it:
#
# ```
# llorch learn init my_llama && cd my_llama
# llorch learn check 00w
# ```
#
# That is **red**: the verdict is `FAIL`, because the bits 0x3f80 mean 1 and the file makes 5.83155e-39 of them. Most
# models are published in bfloat16, numbers of 16 bits. `l00w_warm_up.py` turns them into float32, numbers of 32 bits,
# and moves the bits to the wrong place. Look at four numbers in float32 that bfloat16 can hold exactly:

# %%
import numpy as np

numbers = np.array([1.0, -2.0, 0.15625, 3.140625], np.float32)
for number, pattern in zip(numbers, numbers.view(np.uint32), strict=True):
    print(f"{number:9} = {pattern:032b}")

# %% [markdown]
# The last 16 bits of each are zero. A bfloat16 is the first half. (3.140625 is the best that bfloat16 can do for pi.)
# Correct the constant and check again. That is **green**: the verdict is `PASS`. The check compared all 65,280 bit
# patterns of finite numbers, bit by bit, with the `gguf` package of the authors of llama.cpp.
#
# Go on with [01](../01_rms_norm/README.md). If you use an AI assistant, let it explain the idea or your verdict, and
# write the function yourself. If you are stuck, `llorch learn hint 01` gives three steps: a direction, the formula, the
# code.
#
# ## Where we are
#
# ![Where this lesson is in the model](fig/where.svg)
#
# In lessons 01 to 12, llorch opened the file of the model and turned text into ids. Here you write these parts: the
# table of tensors of a file (25 minutes), the loop of a tokenizer (45) and the table of embeddings (10), in any order.
#
# ## Idea
#
# A model is a file of named arrays. It holds no program.

# %%
import llorch

micro = llorch.load("micro-llama")
data = np.fromfile(micro.weights.path, np.uint8)
tensors = micro.weights.source.tensors
print(f"{data.size:,} bytes, {len(tensors)} tensors")
for info in [*tensors.values()][:3]:
    print(f"{info.name:24} {info.ggml_type.name} {info.shape!s:10} at byte {info.offset:,}")

# %% [markdown]
# A text is a list of whole numbers, its token ids. The vocabulary in the same file decides which numbers:

# %%
for name in ("story", "micro-llama"):
    tokenizer = llorch.load(name).tokenizer
    ids = tokenizer.encode("Once upon a time there was a little fox")
    pieces = [tokenizer.token_bytes(i).decode() or "<begin>" for i in ids]
    print(f"{name:11} {len(ids):2} tokens  {'|'.join(pieces[:10])}")

# %% [markdown]
# Each id then picks a row of the largest table in the file.
#
# ## The maths
#
# ```math
# x_t = E[\mathrm{id}_t]
# ```
#
# $E$ is `token_embd.weight`, (vocab, hidden). $\mathrm{id}$ has the shape (seq,) and $x$ the shape (seq, hidden). The
# rows are picked: no sum, no product, no rounding.
#
# ## The picture
#
# ![The bytes of micro-llama: a header of 11 kB, then tensors](fig/bytes.svg)
#
# **The file.** A GGUF file is read from the front. First come the magic word, a version and two counts. Then come keys
# with values of many types. Then comes one row for each tensor: name, axes, type, and the offset of its data. Zeros
# follow up to a multiple of 32, then the data. Two things go wrong again and again. *Axes are listed fastest first*:
# the file lists the embeddings as 96, 401, and NumPy calls the same bytes (401, 96). *Offsets count from the start of
# the data*, not of the file.
#
# ![How the letters of littlest are joined, pair by pair](fig/merges.svg)
#
# **The tokenizer.** A word is split into single characters. A ranked list says which neighbours may be joined. Find the
# best-ranked pair anywhere in the word, join it, and look again. This is byte pair encoding. It does not go from left
# to right, and it does not look for the longest piece. In the picture, the `st` at the end of ` littlest` is the fourth
# join, and ` lit` at the beginning is the sixth. Two tokens are left, because no pair joins ` little` and `st`.
#
# ## Exercise
#
# Write three functions in `l00_foundation.py`:
#
# ```python
# def tensor_table(data): ...  # names, shapes, types, offsets
# def merge(ids, merges, ranks): ...  # the pieces that are left
# def embedding(ids, table): ...  # rows
# ```
#
# ```
# llorch learn check 00
# llorch learn hint 00
# ```
#
# Your table opens llorch's files: every tensor must have the name, shape, type and SHA-256 that the `gguf` package
# gives. Your loop runs in the tokenizers: six texts must give llama.cpp's ids with five vocabularies.
#
# **Red and green:** the untouched file says `BORROWED   not written yet, llorch's code runs instead: tensor_table,
# merge, embedding`, a wrong function `FAIL`, and three right ones `PASS` after 74 comparisons in 5 models.
#
# ## Run it

# %%
from llorch.apps.learn.lessons import PARTS

tensor_table, merge, embedding = (PARTS[name].reference for name in ("tensor_table", "merge", "embedding"))
# yours: from l00_foundation import embedding, merge, tensor_table
names, shapes, types, offsets = tensor_table(data)
print(names.tobytes().decode().split("\n")[0], shapes[0].tolist(), "type", types[0], "at", offsets[0])
# 0 is "f", 1 is "o", 2 is "x", 3 is "ox", 4 is "fo"; the pair "ox" has the better rank
word, pairs, ranks = np.array([0, 1, 2]), np.array([[1, 2, 3], [0, 1, 4]]), np.array([0, 1])
print("pieces", merge(word, pairs, ranks))
print(embedding(np.array([273, 388, 397]), micro.weights["embed_tokens"])[:, :3].round(4))

# %% [markdown]
# ## A mistake to plant
#
# Give the table the axes in the order of the file, (96, 401). The number of elements fits, so no error is raised, and
# every token picks numbers that belong to many tokens:

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["00"])["embedding"]["embedding-dimensions-not-reversed"]
print(check_functions("00", embedding=wrong))

# %% [markdown]
# A real project took such numbers as proof that the file held a transposed matrix. The "repair" went into a loader that
# the failing test never used.
#
# ## Both engines
#
# - Nothing is computed here, so both engines must agree exactly with the file, and they do.
# - llama.cpp reads the GGUF file itself. transformers gets the arrays that llorch decoded from it, so for GGUF files
#   llama.cpp and the `gguf` package are the reference.
# - Each family splits a text into words in its own way before pairs are joined: Llama 3 cuts digits in threes, Qwen
#   takes them one by one. This is not part of the exercise.
#
# [For porters](PORTING.md): reference code, stages, distances and known mistakes.
