"""Training of a small model with transformers' own class: one seed for everything, a cosine schedule, float32 weights.

AdamW moves the weights; for `story` Muon moves the matrices, because the loss then falls in fewer steps.
"""

import itertools
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from llorch.engines.transformers import CLASSES
from llorch.families.table import FAMILIES
from small_models.corpus import stories
from small_models.shapes import Recipe
from small_models.vocabulary import Vocabulary

_OUTLIERS = (3.0, -1.5, 0.05)
_VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "deepstack_visual_indexes": []}


def train(
    name: str, recipe: Recipe, vocabulary: Vocabulary, *, state: Path | None
) -> tuple[transformers.PreTrainedModel, list[float]]:
    """Train one model.

    Args:
        name: Name in the progress lines and of the state file.
        recipe: Recipe to train, with its number of steps.
        vocabulary: Encodes the text.
        state: Folder for a state to resume from, written every 200 steps, or None.

    Returns:
        The trained model and the loss of every step.
    """
    torch.set_num_threads(recipe.threads)
    torch.use_deterministic_algorithms(True)
    model = new_model(recipe)
    optimizers, schedules = _optimizers(model, recipe)
    file = state / f"{name}.pt" if state else None
    parts = [model, *optimizers, *schedules]
    losses = _resume(file, parts)
    batches = itertools.islice(_batches(recipe, vocabulary), len(losses), None)
    began = time.perf_counter()
    while len(losses) < recipe.steps:
        losses.append(_step(model, optimizers, next(batches), mixed=recipe.mixed))
        for schedule in schedules:
            schedule.step()
        if len(losses) % 50 == 0 or len(losses) == recipe.steps:
            _report(name, recipe, losses, seconds=time.perf_counter() - began)
        if file and len(losses) % 200 == 0:
            torch.save([*(part.state_dict() for part in parts), losses], file)
    return model.eval(), losses


def new_model(recipe: Recipe) -> transformers.PreTrainedModel:
    """Build the model with its starting weights.

    Args:
        recipe: Recipe to build.

    Returns:
        The model, in training mode.
    """
    torch.manual_seed(recipe.seed)
    config_class, model_class = CLASSES[recipe.family]
    values = recipe.config | {"initializer_range": recipe.initial_std}
    if FAMILIES[recipe.family].written_as is not None:  # transformers has no class for the text part alone
        vision = _VISION | {"num_position_embeddings": 4, "out_hidden_size": values["hidden_size"]}
        values = {"text_config": values, "vision_config": vision, "tie_word_embeddings": values["tie_word_embeddings"]}
    model = model_class(config_class(**values)).train()
    if recipe.mixed:
        model.set_attn_implementation("eager")  # in bfloat16 the fused kernel is the slower one
    if recipe.quiet_start:
        _silence(model)
    _unsettle(model, torch.Generator().manual_seed(recipe.seed))
    return model


def _unsettle(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Move gains off one, with a few outliers, and biases off zero: ones and zeros would hide mistakes."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight += 0.3 * torch.randn(weight.shape, generator=generator)
                channels = torch.randperm(len(weight), generator=generator)[: len(_OUTLIERS)]
                weight[channels] = torch.tensor(_OUTLIERS)
            elif name.endswith("A_log"):
                weight.copy_(torch.linspace(-3, math.log(16), len(weight)))
            elif name.endswith("dt_bias"):  # the last head forgets all at once, the others more and less
                weight.copy_(torch.tensor([*torch.linspace(-5, 1, len(weight) - 1), 18.5]))
            elif name.endswith(".bias"):
                weight += 0.2 * torch.randn(weight.shape, generator=generator)


def _silence(model: torch.nn.Module) -> None:
    """Let every block begin by adding nothing, so that the residual stream begins as the token itself."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()


def _batches(recipe: Recipe, vocabulary: Vocabulary) -> Iterator[torch.Tensor]:
    """Yield batches of windows; every window begins with a story and is filled up with more of them."""
    texts = stories(recipe.seed)
    for length in itertools.cycle(recipe.windows):
        yield torch.tensor([_window(texts, length, vocabulary) for _ in range(recipe.batch // length)])


def _window(texts: Iterator[str], length: int, vocabulary: Vocabulary) -> list[int]:
    ids: list[int] = []
    while len(ids) < length:
        ids += [*vocabulary.tokenizer.encode(next(texts)).ids, vocabulary.end_id]
    return ids[:length]


def _optimizers(
    model: torch.nn.Module, recipe: Recipe
) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
    parameters = dict(model.named_parameters())
    embeddings = [weight for name, weight in parameters.items() if "embed_tokens" in name]
    vectors = [weight for weight in parameters.values() if weight.ndim == 1]
    matrices = [w for n, w in parameters.items() if w.ndim == 2 and "embed_tokens" not in n]
    rate = recipe.learning_rate
    groups: list[dict[str, Any]] = [
        {"params": embeddings, "lr": rate * recipe.embedding_rate, "weight_decay": 0.0},
        {"params": vectors, "lr": rate, "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if recipe.muon_rate is None:
        groups.append({"params": matrices, "lr": rate, "weight_decay": 0.1})
    else:
        optimizers.append(torch.optim.Muon(matrices, lr=recipe.muon_rate, weight_decay=0.01))
    optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8))
    warmup = max(1, recipe.steps // 20)

    def factor(step: int) -> float:
        progress = (step - warmup) / max(1, recipe.steps - warmup)
        return (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * progress))

    return optimizers, [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]


def _step(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], ids: torch.Tensor, *, mixed: bool) -> float:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def _resume(file: Path | None, parts: list[Any]) -> list[float]:
    """Load a state if there is one and return the losses so far."""
    if file is None or not file.exists():
        return []
    *states, losses = torch.load(file, weights_only=True)
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    return losses


def _report(name: str, recipe: Recipe, losses: list[float], *, seconds: float) -> None:
    recent = sum(losses[-20:]) / len(losses[-20:])
    print(
        f"{name}: step {len(losses)}/{recipe.steps} loss {recent:.4f} {seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )
