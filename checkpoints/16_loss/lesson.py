# %% [markdown]
# # 16 loss
#
# 25 minutes, three functions, two of them with one line. The lines are short, and the usual mistake is to give them the
# wrong numbers.
#
# ## Where we are
#
# ![The steps of training, with this lesson's box lit](fig/where.svg)
#
# The model and its adapter ([15](../15_lora_delta/README.md)) turn ids into logits. Training needs one number that says
# how bad they are. This number is the mean surprise at the actual tokens, at the places where the model has to learn.
#
# ## Idea
#
# A row of logits is turned into probabilities. If the actual token had probability $p$, the surprise is $-\log p$. It
# is 0 for a certain token, 0.69 for a coin, and $\log 1003 = 6.91$ for a guess among all 1,003 tokens of `story`. Here
# is `story`, which has never seen a pirate, on the beginning of a tale about one:

# %%
import numpy as np

import llorch
from llorch.ops.cross_entropy import cross_entropy, shifted

story = llorch.load("story")
text = "Once upon a time, there was a brave pirate named Grace."
ids = np.array(story.tokenizer.encode(text))
logits, targets = story.forward(ids), shifted(ids)
for row in range(len(ids) - 1):
    z, target = logits[row : row + 1], targets[row : row + 1]
    loss, _ = cross_entropy(z, target, label_smoothing=0.0)
    piece = story.tokenizer.decode([int(target[0])])
    print(f"{piece!r:>10} {loss:6.2f}  {'#' * round(2 * loss)}".rstrip())

# %% [markdown]
# The opening of every tale costs nothing. `story` has no token for *pirate*, so the word takes three pieces. Each costs
# more than a blind guess, because the model is *sure* that something else comes. These tokens give the largest
# gradient.
#
# ## The maths
#
# ```math
# \begin{aligned}
# \ell_t &= (1 - e)\,(-\log p_{t,\,y_{t+1}}) + e\,\frac{1}{V}\sum_v -\log p_{t,v} \\
# L &= \frac{1}{n} \sum_{y_{t+1} \ne -100} \ell_t, \qquad n = \text{learned tokens of the whole optimizer step}
# \end{aligned}
# ```
#
# | symbol | shape | meaning |
# | --- | --- | --- |
# | $p$ | (seq, vocab) | softmax of the logits, row by row |
# | $y$ | (seq,) | labels: the id of a token that is to be learned, else -100 |
# | $e$ | a number | label smoothing: this share of the target goes to all tokens alike |
# | $\ell$ | (seq,) | surprise of every row, in nats |
#
# By hand: logits $(2, 0, 0)$ give $p = (0.787, 0.107, 0.107)$. If token 0 came, the loss is 0.240. If token 1 came, it
# is 2.240. With $e = 0.1$ the first becomes $0.9 \cdot 0.240 + 0.1 \cdot 1.573 = 0.373$.
#
# Three decisions are not in the formula, and each can go wrong. The shift: row $t$ has seen tokens up to $t$, so token
# $t + 1$ judges it. The mask: a prompt is read, not learned. The count: the sum is divided by the number of learned
# tokens, not of all tokens.
#
# The logits of a real model may be in the hundreds, and $e^{100}$ overflows float32. Subtract the maximum of the row
# first; it cancels.
#
# ## The picture
#
# ![Loss of every token of a tale and of a pirate's tale](fig/strip.svg)
#
# Above is a tale of the kind that `story` was trained on, below a tale that it will learn. The dashed line is a blind
# guess. Even above, some tokens have a high loss: the animal and the name cannot be predicted. A loss has a lowest
# value, and it is not 0.
#
# ## Exercise
#
# Write three functions in `l16_loss.py`:
#
# ```python
# def masked_labels(ids, learned) -> np.ndarray: ...
# def shifted(labels) -> np.ndarray: ...
# def cross_entropy(logits, labels, label_smoothing) -> tuple[float, int]: ...
# ```
#
# ```
# llorch learn check 16
# llorch learn hint 16
# ```
#
# The check computes the loss from PEFT's logits, token by token and as a whole, with and without label smoothing.
#
# **Red and green:** the untouched file gives `BORROWED`: llorch's functions run. Red is `FAIL`, with the first wrong
# loss ([below](#a-mistake-to-plant)). Green is one line with `PASS` ([below](#run-it)), and `llorch learn list` shows
# `PASS` next to 16.
#
# ## Run it
#
# The example from above, then the labels of three tokens whose first is a prompt:

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

# yours: from l16_loss import cross_entropy, masked_labels, shifted
parts = {part.name: part.reference for part in BY_NUMBER["16"].parts}
masked_labels, shifted, cross_entropy = parts.values()
z = np.array([[2, 0, 0]], np.float32)
for label, e in ((0, 0.0), (1, 0.0), (0, 0.1)):
    loss, _ = cross_entropy(z, np.array([label]), e)
    print(f"token {label} came, e = {e}: {loss:.3f}")
labels = masked_labels(np.array([7, 8, 9]), np.array([False, True, True]))
print("labels", labels, "wanted from each row", shifted(labels))
print(check_functions("16", **parts))

# %% [markdown]
# ## A mistake to plant
#
# Forget the shift: compare row $t$ with label $t$. Nothing looks wrong, because shapes fit and numbers are finite. But
# the model learns to repeat the last word, and the loss of such a run even falls to zero, because copying is easy.

# %%
wrong = typed_mistakes(BY_NUMBER["16"])["shifted"]["loss-labels-not-shifted"]
print(check_functions("16", shifted=wrong))

# %% [markdown]
# A quieter mistake needs two libraries: the data loader shifts the labels, and the loss shifts them again. Each is
# right alone. Its loss is plausible, and so is that of a learned prompt or of a wrong count.
#
# ## Both engines
#
# - PEFT uses torch's `cross_entropy`: log softmax in one piece, as you do. A softmax and then a logarithm would lose
#   digits, because float32 has few numbers near to 1.
# - torch spreads $e$ over the whole vocabulary, the label included. $e / (V - 1)$ on the other tokens is another
#   formula.
# - transformers takes the mean of each call unless it gets the number of tokens of the step (`num_items_in_batch`).
#   Lesson [19](../19_training_curve/README.md) shows why this matters.
#
# [For porters](PORTING.md): reference code, compared values and all known mistakes of this lesson.
