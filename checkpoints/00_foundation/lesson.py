# %% [markdown]
# # 00 foundation
#
# A warm-up of two minutes, then three parts: a file (25 minutes), a tokenizer (45), a table (10). Take them in any
# order. On the fast track, take the warm-up and go on to [01](../01_rms_norm/README.md).
#
# ## Where we are
#
# ![The way of a token through the model, with this lesson's box lit](fig/where.svg)
#
# This is the very beginning. There is a file on the disk and a sentence in your hand. At the end of this lesson there
# is an array of shape (seq, hidden), one row of numbers for each token, and the rest of the model only ever sees
# that.
#
# ## Idea
#
# A model is a file of named arrays. It holds no program. The other lessons explain how the arrays are used.

# %%
import inspect

import numpy as np

import llorch
from llorch.runtime.builtin import builtin_path

micro = llorch.load("micro-llama")
data = np.fromfile(builtin_path("micro-llama"), np.uint8)
print(f"{data.size:,} bytes, {len(micro.weights.source.tensors)} tensors")
for info in [*micro.weights.source.tensors.values()][:5]:
    print(f"{info.name:24} {info.ggml_type.name} {info.shape!s:10} at byte {info.offset:,}")

# %% [markdown]
# A text is a list of whole numbers. The vocabulary in the same file decides which numbers:

# %%
SENTENCE = "Once upon a time there was a little fox"
for name in ("story", "micro-llama", "micro-qwen2"):
    tokenizer = llorch.load(name).tokenizer
    ids = tokenizer.encode(SENTENCE)
    pieces = [tokenizer.token_bytes(i).decode() or "<begin>" for i in ids]
    print(f"{name:11} {len(ids):2} tokens  {'|'.join(pieces[:13])}")

# %% [markdown]
# Each id then picks a row of the largest table in the file. This lesson covers no more than that.
#
# ## Warm-up
#
# Most models are published in bfloat16: 16 bits, which are the upper half of a float32. To make one from the other
# takes a shift and no arithmetic.

# %%
bits = np.array([0x3F80, 0xC000, 0x3E20, 0x4049], np.uint16)
for pattern, number in zip(bits, (bits.astype(np.uint32) << 16).view(np.float32), strict=True):
    print(f"{pattern:#06x} = {pattern:016b}  {number}")

# %% [markdown]
# `0x4049` is the best that bfloat16 can do for pi. The file `l00w_warm_up.py` holds the conversion with one wrong
# constant. Correct it, then check it:
#
# ```
# llorch learn check 00w
# ```
#
# The check takes all 65,280 bit patterns that stand for finite numbers. It compares your results with the `gguf`
# package, which the authors of llama.cpp wrote. Your results must be equal bit by bit. (No built-in model is stored
# in bfloat16, so this function opens none of them. The same line reads every published bfloat16 model.)
#
# ## The maths
#
# ```math
# x_t = E[\mathrm{id}_t]
# ```
#
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $\mathrm{id}$ | (seq,) | token ids, whole numbers from 0 |
# | $E$ | (vocab, hidden) | `token_embd.weight` in GGUF, `embed_tokens` in Hugging Face |
# | $x$ | (seq, hidden) | the rows that were picked: no sum, no product, no rounding |
#
# ## The picture
#
# ![The bytes of micro-llama: a header of 11 kB, then tensors](fig/bytes.svg)
#
# **The file.** A GGUF file is read from the front. First come the magic word, a version and two counts. Then come
# keys with values of many types, the vocabulary among them. Then comes one row for each tensor: name, axes, type, and
# the offset of its data. Zeros follow up to a multiple of 32, then the data.
#
# Two things go wrong again and again. *Axes are listed fastest first*: the file lists the table of `micro-llama` as
# 96, 401, and NumPy calls the same bytes (401, 96). Nothing is transposed. *Offsets count from the start of the
# data*, not of the file, and the data starts after the padding.
#
# ![How the letters of littlest are joined, pair by pair](fig/merges.svg)
#
# **The tokenizer.** A word is split into single characters. A ranked list of pairs says which neighbours may be
# joined. Find the best-ranked pair anywhere in the word, join it, and look again. This is byte pair encoding. It does
# not go from left to right, and it does not look for the longest piece. The picture shows ` littlest` in `story`: the
# `st` at the end is the fourth join and ` lit` at the beginning the sixth. Two tokens are left, since no pair joins `
# little` and `st`.
#
# Each family splits a text into words in a different way, which is not part of the exercise. Llama 3 cuts digits in
# threes, Qwen takes them one by one. The vocabulary of `micro-llama` is of the older SentencePiece kind: spaces
# become part of a piece, and each pair has a score. Pairs of equal score join from the left.
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
# Your table replaces llorch's where files are opened. It is right when every tensor of all five models has the name,
# shape, type and SHA-256 that the `gguf` package gives.
#
# Your loop replaces llorch's in the SentencePiece tokenizer, and the `tokenizers` library's in the byte-level
# tokenizers. It is right when six texts give llama.cpp's ids with five vocabularies.
#
# ## Run it
#
# The three parts as you will write them, one after the other. First the table:

# %%
from llorch.apps.learn.lessons import PARTS

names, shapes, types, offsets = PARTS["tensor_table"].reference(data=data)
names = names.tobytes().decode().split("\n")
print(names[0], shapes[0].tolist(), "type", types[0], "at", offsets[0])
rows, columns = shapes[0, 2:]
table = data[offsets[0] : offsets[0] + 4 * rows * columns].view("<f4").reshape(rows, columns)
print("as the loader reads it:", np.array_equal(table, micro.weights["embed_tokens"]))

# %% [markdown]
# Then a word of three letters, with numbers for pieces: 0 is `f`, 1 is `o`, 2 is `x`, 3 is `ox`, 4 is `fo`. Both
# pairs could be joined, and `ox` has the better rank.

# %%
word, pairs, ranks = np.array([0, 1, 2]), np.array([[1, 2, 3], [0, 1, 4]]), np.array([0, 1])
print(PARTS["merge"].reference(ids=word, merges=pairs, ranks=ranks))

# %% [markdown]
# And the rows of a few tokens:

# %%
ids = np.array(micro.tokenizer.encode(" fox"))
x = PARTS["embedding"].reference(ids=ids, table=table)
for i, row in zip(ids, x, strict=True):
    piece = micro.tokenizer.token_bytes(int(i)).decode() or "<begin>"
    print(f"{i:3} {piece!r:10} {row[:3].round(4)} ...  rms {np.sqrt(np.mean(row**2)):.4f}")

# %% [markdown]
# They are small, around 0.02. The next lesson is about that.
#
# ## The mistake
#
# The mistake is to take the axes in the order of the file. The number of elements fits, so no error is raised. Every
# token now picks a column of numbers that belong to many tokens.

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["00"])["embedding"]["embedding-dimensions-not-reversed"]
print(inspect.getsource(wrong))
print(check_functions("00", embedding=wrong))

# %% [markdown]
# A real project took this as proof that the file held a transposed matrix. The "repair" went into a loader that the
# failing test never used. The diagnosis above names the mistake and the right way. It is no guess: the same mistake,
# injected into llorch's code, gives the same numbers.
#
# In the merge loop, the mistake is to go from left to right:

# %%
arguments = word, pairs, ranks


def from_the_left(ids: np.ndarray, merges: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    listed = {(first_id, second_id): joined_id for first_id, second_id, joined_id in merges.tolist()}
    done: list[int] = []
    for piece in ids.tolist():
        while done and (done[-1], piece) in listed:
            piece = listed[done.pop(), piece]
        done.append(piece)
    return np.array(done, np.int64)


print(PARTS["merge"].reference(*arguments), from_the_left(*arguments))
print(check_functions("00", merge=from_the_left))

# %% [markdown]
# Two ids of the first text are wrong. With the next vocabulary, even the number of pieces differs. The library of
# known mistakes has no entry for tokenizers, so the check names no mistake here.
