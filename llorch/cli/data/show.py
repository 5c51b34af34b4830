"""`llorch data show`: show which tokens of training data are in the loss."""

from typing import TYPE_CHECKING, Any

import click

from llorch.cli.model_options import template_options
from llorch.cli.options import MODEL, WholeNumber, group, json_option, page_option, verb
from llorch.cli.output import progress, say, to_json

if TYPE_CHECKING:
    from datetime import datetime

    from llorch.model.model import Model
    from llorch.training.data import TrainingData, TrainOn


@verb(
    "Show which tokens of training data count in the loss.",
    "llorch data show story pirate -n 1",
    "llorch data show story path/to/train.jsonl",
    "llorch data show story path/to/folder --split valid --max-length 512",
    page="data.md",
)
@click.argument("model", type=MODEL)
@click.argument("data")
@group(
    "Data",
    page_option(
        "--split", type=click.Choice(["train", "valid", "test"]), default="train", show_default=True,
        help="File of the folder.",
    ),
    page_option(
        "--max-length", type=WholeNumber(min=2),
        help="Most tokens of an example; a longer one is cut.  [default: the model's context, at most 1024]",
    ),
    page_option(
        "--train-on", type=click.Choice(["assistant", "last", "all"]), default="assistant", show_default=True,
        help="Tokens to learn: all turns of the assistant or the completion, the last turn only, or all tokens.",
    ),
    page_option("--parse-special", is_flag=True, help="Control tokens read from plain text."),
)  # fmt: skip
@template_options
@group(
    "Output",
    page_option("-n", "count", type=WholeNumber(min=0), default=3, show_default=True, help="Number of examples shown."),
)
@json_option("One object: counts, notes, and the examples with ids and a mask of learned tokens.")
def command(*, model: str, data: str, count: int, split: str, as_json: bool, **values: Any) -> None:
    """Encode DATA for MODEL; print counts and examples that show which tokens training learns.

    Learned tokens are green, or in [[brackets]] without colour. Control tokens are underlined.

    DATA is pirate or pirate-chat (built in), a .jsonl file, a .json list, or a folder with train.jsonl. Rows have one
    of these forms: text; prompt and completion; messages; conversations (ShareGPT); instruction and output (Alpaca);
    input_ids.
    """
    from llorch.cli.data.examples import as_object, facts_of, pieces_of, print_examples, summary
    from llorch.cli.inputs import has_vocabulary, model_path
    from llorch.files import open_weights
    from llorch.model.model import Model

    model_of_data = Model(open_weights(model_path(model)))
    training_data = _read_data(model_of_data, data, **values)
    examples = {"train": training_data.train, "valid": training_data.valid, "test": training_data.test}[split]
    if not examples:
        raise FileNotFoundError(f"data: {data} has no {split}.jsonl")
    tokenizer = model_of_data.tokenizer if has_vocabulary(model_of_data.weights.source) else None
    spans = [(example, pieces_of(example, tokenizer)) for example in examples[:count]]
    facts = facts_of(training_data, examples)
    if as_json:
        click.echo(to_json(facts | {"shown": [as_object(example, pieces) for example, pieces in spans]}))
        return
    for line in training_data.notes:
        say(line)
    print_examples(spans)
    click.echo("\n".join(summary(split, facts)))


def _read_data(
    model: "Model", data: str, *, max_length: int | None, train_on: "TrainOn", parse_special: bool,
    template_date: "datetime | None", chat_template_kwargs: "dict | None",
) -> "TrainingData":  # fmt: skip
    """Read data as training does, with the default length of `llorch lora train`."""
    from llorch.cli.inputs import say_once
    from llorch.runtime.builtin import find_data
    from llorch.training.data import DataSettings, read_data

    settings = DataSettings(
        max_length=max_length or min(DataSettings.max_length, model.config.max_position_embeddings), train_on=train_on,
        parse_special=parse_special, chat_template_kwargs=chat_template_kwargs or {},
        template_date=None if template_date is None else template_date.date().isoformat(),
    )  # fmt: skip
    with progress("reading data") as report:
        return read_data(find_data(data, say_once), model, settings, progress=report)
