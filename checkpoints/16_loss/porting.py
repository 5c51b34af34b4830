# %% [markdown]
# # 16 loss: for porters
#
# The [lesson](README.md) explains the idea. Here are the reference code, the values that are compared and how the two
# engines differ.
#
# ## The reference
#
# <!-- source: llorch.ops.cross_entropy.shifted -->
#
# <!-- source: llorch.ops.cross_entropy.cross_entropy -->
#
# <!-- source: llorch.ops.cross_entropy.log_softmax -->
#
# The reference returns a sum and a count, not a mean. Lesson [19](../19_training_curve/README.md) will show why: a
# step may have several batches, and the divisor is known only after all of them.
#
# ## Where the engines differ

# %%
import numpy as np

from llorch.judging.expectations.training import stored
from llorch.judging.expectations.training_refs import at
from llorch.ops.cross_entropy import cross_entropy, shifted

weights, golden = stored("micro-llama")
stage_ref = at("token_losses")
reference, actual = golden.reference("isolated", stage_ref), golden.shown(stage_ref)
print(
    f"torch, float32 from float64: ~{np.abs(actual - reference).max():.0e} nats, of losses up to {reference.max():.2f}"
)

# %% [markdown]
# The smallest loss of this batch is 0.00088, which is $-\log 0.99912$. A softmax and then a logarithm would keep
# three of its seven digits, because float32 has few numbers so near to 1. Both engines use log softmax in one piece.
#
# - torch's label smoothing spreads $e$ over the whole vocabulary, the label included. The formula with $e / (V - 1)$
#   on the other tokens is a different one.
# - transformers takes the mean of each call unless it is told the number of tokens of the step
#   (`num_items_in_batch`).
# - On a base in bfloat16 the logits are bfloat16 too. transformers and llorch convert them to float32 for the loss
#   ([17](../17_gradients/PORTING.md#in-bfloat16)).
# - llorch's torch path skips rows of logits from which nothing is learned. With `chunk`, it does not make all other
#   rows at once. For a vocabulary of 150,000, the logits of 2,000 tokens are 1.2 GB. Often the logits, not the model,
#   do not fit into memory.
#
# Five losses of the first batch are plausible, and one is right:

# %%
from llorch.apps.learn.lessons import BY_NUMBER, typed_mistakes

wrong = typed_mistakes(BY_NUMBER["16"])
documents = list(golden.batches[0].each_document())
rows = np.split(golden.shown(at("adapted_logits")), [len(documents[0][0])])


def loss_with(labels_of=lambda ids, labels: labels, shift=shifted, entropy=cross_entropy) -> float:
    losses = [
        entropy(z, shift(labels_of(ids, labels)), label_smoothing=0.0)
        for z, (ids, labels) in zip(rows, documents, strict=True)
    ]
    return sum(total for total, _ in losses) / sum(n for _, n in losses)


learned = wrong["masked_labels"]["loss-prompt-not-masked"]
print(f"right                  {loss_with():.3f}   torch {float(golden.shown(at('loss'))):.3f}")
print(f"not shifted            {loss_with(shift=wrong['shifted']['loss-labels-not-shifted']):.3f}")
print(f"shifted twice          {loss_with(shift=wrong['shifted']['loss-labels-shifted-twice']):.3f}")
print(f"prompt learned         {loss_with(lambda ids, labels: learned(ids, labels >= 0)):.3f}")
print(f"divided by all tokens  {loss_with(entropy=wrong['cross_entropy']['loss-divided-by-all-tokens']):.3f}")

# %% [markdown]
# The last one looks best because it is smaller, but it only acts as a smaller learning rate.
#
# Further reading:
#
# - Szegedy et al., [Rethinking the Inception Architecture](https://arxiv.org/abs/1512.00567), 2015, section 7: label
#   smoothing.
# - torch's [cross_entropy](https://pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html): the
#   combined effect of `ignore_index` and `reduction`.
#
# ## Stages
#
# <!-- generated: stages -->
# <!-- end -->
#
# ## Compared values
#
# The beginning of each row is a prompt (label -100), rows are padded, and the numbers of learned tokens differ.
# `plain` is without label smoothing, `smoothed` with e = 0.1. Isolated, the loss is computed from PEFT's logits.
#
# <!-- generated: distances -->
# <!-- end -->
#
# How to read the numbers: [index](../PORTING.md#how-to-read-a-page).
#
# ## Mistakes it catches
#
# `pytest tests/faults` replaces one of llorch's functions by each mistake. The test requires that this validation
# point fails first, by at least ten times the tolerance.
#
# <!-- generated: mistakes -->
# <!-- end -->
#
# ## Check it
#
# ```
# pytest -k checkpoint_16                   # the comparison, and every mistake of this page, injected
# llorch verify micro-llama --detail
# llorch verify micro-llama --backend torch --dtype float32 --detail
# ```
