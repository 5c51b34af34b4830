# %% [markdown]
# # 16 loss
#
# 25 minutes, three functions, two of them with one line. The lines are short, and the usual mistake is to give them
# the wrong numbers.
#
# ## Where we are
#
# ![The lessons in their order, with this one lit](fig/where.svg)
#
# The model and its adapter ([15](../15_lora_delta/README.md)) turn ids into logits. Training needs one number that
# says how bad they are. This number is the mean surprise at the actual tokens, at the places where the model has to
# learn.
#
# ## Idea
#
# A row of logits is turned into probabilities. If the actual token had probability $p$, the surprise is $-\log p$. It
# is 0 for a certain token, 0.69 for a coin, and $\log 1003 = 6.91$ for a guess among all 1,003 tokens of `story`.
# Here is `story`, which has never seen a pirate, on the beginning of a tale about one:

# %%
import inspect

import numpy as np

import llorch
from llorch.ops.cross_entropy import cross_entropy, shifted

story = llorch.load("story")
ids = np.array(story.tokenizer.encode("Once upon a time, there was a brave pirate named Grace."))
logits, targets = story.forward(ids), shifted(ids)
for row in range(len(ids) - 1):
    loss, _ = cross_entropy(logits[row : row + 1], targets[row : row + 1], label_smoothing=0.0)
    print(f"{story.tokenizer.decode([int(targets[row])])!r:>10} {loss:6.2f}  {'#' * round(2 * loss)}".rstrip())

# %% [markdown]
# The opening of every tale costs nothing. `story` has no token for *pirate*, so the word takes three pieces. Each
# costs more than a blind guess, because the model is *sure* that something else comes. These tokens give the largest
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
# By hand: logits $(2, 0, 0)$ give $p = (0.787, 0.107, 0.107)$. If token 0 came, the loss is 0.240. If token 1 came,
# it is 2.240. With $e = 0.1$ the first becomes $0.9 \cdot 0.240 + 0.1 \cdot 1.573 = 0.373$.
#
# Three decisions are not in the formula, and each can go wrong. The shift: row $t$ has seen tokens up to $t$, so
# token $t + 1$ judges it. The mask: a prompt is read, not learned. The count: the sum is divided by the number of
# learned tokens, not of all tokens.
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
# def masked_labels(ids, learned) -> np.ndarray:
# def shifted(labels) -> np.ndarray:
# def cross_entropy(logits, labels, label_smoothing) -> tuple[float, int]:
# ```
#
# ```
# llorch learn check 16
# llorch learn hint 16
# ```
#
# The check computes the loss from PEFT's logits, token by token and as a whole, with and without label smoothing.
#
# ## Run it
#
# This is the first batch of the goldens. It has two rows, whose first tokens are a prompt.

# %%
from llorch.judging.expectations.training import stored
from llorch.judging.expectations.training_refs import at

weights, golden = stored("micro-llama")
documents = list(golden.batches[0].each_document())
rows = np.split(golden.shown(at("adapted_logits")), [len(documents[0][0])])
sums = [cross_entropy(z, shifted(y), label_smoothing=0.0) for z, (_, y) in zip(rows, documents, strict=True)]
for (total, n), (ids, _) in zip(sums, documents, strict=True):
    print(f"{len(ids)} tokens, {n} learned, sum {total:.4f}")
loss = sum(total for total, _ in sums) / sum(n for _, n in sums)
print(f"loss {loss:.6f}   torch says {float(golden.shown(at('loss'))):.6f}")

# %% [markdown]
# The logits of a real model may be in the hundreds, and `exp(100)` overflows float32. So the maximum is subtracted
# first, and it cancels.

# %%
z = np.array([[200.0, 190.0, 0.0]], np.float32)
with np.errstate(all="ignore"):
    print("naive    ", -np.log(np.exp(z) / np.exp(z).sum()))
print("shifted  ", [round(cross_entropy(z, np.array([i]), label_smoothing=0.0)[0], 4) for i in range(3)])

# %% [markdown]
#
# ## The mistake
#
# Labels are ids of the same tokens as the input. If you compare row $t$ with label $t$, nothing looks wrong: shapes
# fit, numbers are finite. But the model learns to repeat the last word. The loss of such a run even falls to zero,
# because copying is easy.

# %%
from llorch.apps.learn.check import check_functions
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["16"])
not_shifted = wrong["shifted"]["loss-labels-not-shifted"]
print(inspect.getsource(not_shifted))
print(check_functions("16", shifted=not_shifted))

# %% [markdown]
# Another common mistake needs two libraries: the data loader shifts the labels, and the loss shifts them again. Each
# is right alone. A third mistake is the mask: if the prompt is learned too, the number is different, and the model
# learns to ask questions.

# %%
right = float(golden.shown(at("loss")))


def loss_with(labels_of, shift, entropy=cross_entropy) -> float:
    losses = [
        entropy(z, shift(labels_of(ids, labels)), label_smoothing=0.0)
        for z, (ids, labels) in zip(rows, documents, strict=True)
    ]
    return sum(total for total, _ in losses) / sum(n for _, n in losses)


def as_given(ids, labels):
    return labels


learned = wrong["masked_labels"]["loss-prompt-not-masked"]
counted = wrong["cross_entropy"]["loss-divided-by-all-tokens"]
print(f"right                  {right:.3f}")
print(f"not shifted            {loss_with(as_given, not_shifted):.3f}")
print(f"shifted twice          {loss_with(as_given, wrong['shifted']['loss-labels-shifted-twice']):.3f}")
print(f"prompt learned         {loss_with(lambda ids, labels: learned(ids, labels >= 0), shifted):.3f}")
print(f"divided by all tokens  {loss_with(as_given, shifted, counted):.3f}")

# %% [markdown]
# All five losses are plausible, and one is right. The last one looks best because it is smaller, but it only acts as
# a smaller learning rate.
