# %% [markdown]
# # 00 foundation: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# The tensor table of the file:
#
# <!-- source: llorch.files.gguf.read_tensor_table -->
#
# llorch refuses a file with gaps or overlaps between tensors, since two names could share bytes. The exercise does not
# ask for it.
#
# The merge loop for SentencePiece keeps a queue of pairs, so a long text takes n log n steps. A loop that looks at
# all pairs again after every join is right as well. The last hint shows that loop.
#
# <!-- source: llorch.files.tokenizer.sentencepiece.merge -->
#
# And the rows:
#
# <!-- source: llorch.ops.embedding.embedding -->
#
# ## Where the engines differ
#
# Nothing is computed here, so the engines must agree exactly, and they do:

# %%
import numpy as np

import llorch
from llorch.judging.goldens.forward import read
from llorch.runtime.builtin import goldens_folder

micro = llorch.load("micro-llama")
golden = read(goldens_folder() / "micro-llama")
rows = micro.weights["embed_tokens"][list(golden.cases["near"].ids)]
for engine, output in golden.engine_outputs.items():
    print(f"{engine:13} rows equal to the file's: {np.array_equal(output.traces['near']['embed'], rows)}")
text = golden.tokens[4]
print(repr(text.text), "->", len(text.ids["llamacpp"]), "ids, equal to llorch's:", end=" ")
print(micro.tokenizer.encode(text.text) == list(text.ids["llamacpp"]))

# %% [markdown]
# - Every distance below is exactly 0.
# - GGUF writes dimensions fastest first. The NumPy shape is the reverse. The bytes stay as they are.
# - Pairs of equal score join from the left in SentencePiece vocabularies such as that of `micro-llama`.
# - GGUF files of the Llama family hold the rows of q and k in another order than Hugging Face. The table compares
#   bytes as stored. llorch restores the order when it hands out an array, in
#   [`files/tensor_names.py`](../../llorch/files/tensor_names.py).
# - For a GGUF file, transformers gets the arrays that llorch decoded, and it has no tokenizer. There llama.cpp and
#   the `gguf` package are the reference engines for the file. For a Hugging Face folder it is the other way round:
#   transformers loads and tokenizes by itself. llama.cpp then gets a temporary float32 GGUF file that llorch writes,
#   without a vocabulary.
#
# Further reading:
#
# - [The GGUF format](https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), as its authors describe it.
# - Sennrich, Haddow and Birch, [Neural Machine Translation of Rare Words with Subword
#   Units](https://arxiv.org/abs/1508.07909), 2015: byte pair encoding, with the loop in twenty lines of Python.
# - [llama.cpp 6914](https://github.com/ggml-org/llama.cpp/issues/6914), repaired in
#   [6920](https://github.com/ggml-org/llama.cpp/pull/6920): words cut by another expression than Llama 3 was trained
#   with. The model was sound, the ids were not.
# - [llama-cpp-python 1501](https://github.com/abetlen/llama-cpp-python/issues/1501): the beginning token twice.
#
# ## Stages
#
# Tensors are read by [`files/gguf.py`](../../llorch/files/gguf.py) and
# [`files/safetensors.py`](../../llorch/files/safetensors.py), text by
# [`tokenizer/`](../../llorch/files/tokenizer/tokenizer.py). The suite
# [`files.py`](../../llorch/judging/expectations/files.py) compares both. One stage belongs here:
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# - `tensors`: name, type and shape of every tensor. For a GGUF file also the SHA-256 of the bytes, as the `gguf`
#   package reads them. For a Hugging Face folder the `safetensors` package reads name, type and shape.
# - `token_ids`: llorch's ids of some texts against the engine's tokenizer. The texts are: an empty one, spaces,
#   several scripts, emoji, code, and the names of special tokens as plain text. The ids must be equal.
# - `embed`: the rows that were picked.
#
# <!-- generated: equal -->
# <!-- end -->
#
# <!-- generated: distances -->
# <!-- end -->
#
# How to read the numbers: [index](../PORTING.md#how-to-read-a-page).
#
# ## Mistakes it catches
#
# <!-- generated: mistakes -->
# <!-- end -->
#
# ## Check it
#
# ```
# pytest -k checkpoint_00                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# ```
