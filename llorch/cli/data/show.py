"""`llorch data show`: which tokens of training data are learned."""

from typing import TYPE_CHECKING

import click

from llorch.cli.options import MODEL, WholeNumber, json_option, template_options, verb
from llorch.cli.output import progress, say, to_json

if TYPE_CHECKING:
    from datetime import datetime

    from llorch.train.data import TrainOn


@verb(
    "Show which tokens of training data are learned.",
    "llorch data show story pirate -n 1",
    "llorch data show story path/to/train.jsonl",
    "llorch data show story path/to/folder --split valid -n 10",
    "llorch data show story path/to/folder --max-length 512 --json",
)
@click.argument("model", type=MODEL)
@click.argument("data")
@click.option("-n", "count", type=WholeNumber(min=0), default=3, show_default=True, help="Show so many examples.")
@click.option(
    "--split", type=click.Choice(["train", "valid", "test"]), default="train", show_default=True,
    help="Which file of the folder.",
)  # fmt: skip
@click.option(
    "--max-length", type=WholeNumber(min=2),
    help="Most tokens of an example; longer ones lose their end.  [default: the model's context, at most 1024]",
)  # fmt: skip
@click.option(
    "--train-on", type=click.Choice(["assistant", "last", "all"]), default="assistant", show_default=True,
    help="Learn every turn of the assistant (or the completion), the last one only, or every token.",
)  # fmt: skip
@click.option("--parse-special", is_flag=True, help="In plain text, the text of a control token is that token.")
@template_options
@json_option("One object: counts, notes, and the examples with ids and which of them are learned.")
def command(
    *, model: str, data: str, count: int, split: str, max_length: int | None, train_on: "TrainOn", parse_special: bool,
    template_date: "datetime | None", chat_template_kwargs: "dict | None", as_json: bool,
) -> None:  # fmt: skip
    """Encode DATA for MODEL and print some examples, and counts.

    What is learned is green, or stands in [[brackets]] where there is no colour; control tokens are underlined.

    DATA is a file of JSON lines or a .json list, a folder with train.jsonl and perhaps valid.jsonl and test.jsonl, or
    pirate, which is built in. Formats are told apart by the keys of a row: text (learned whole); prompt and completion;
    messages, with tools; conversations (ShareGPT); instruction and output (Alpaca); input_ids, with labels.
    """
    from llorch.builtin import find_data
    from llorch.cli.data.examples import as_object, facts_of, pieces_of, print_examples, summary
    from llorch.cli.inputs import has_vocabulary, model_path, say_once
    from llorch.files import open_weights
    from llorch.model import Model
    from llorch.train.data import DataSettings, read_data

    opened = Model(open_weights(model_path(model)))
    room = max_length or min(DataSettings.max_length, opened.config.max_position_embeddings)
    settings = DataSettings(
        max_length=room, train_on=train_on, parse_special=parse_special,
        chat_template_kwargs=chat_template_kwargs or {},
        template_date=None if template_date is None else template_date.date().isoformat(),
    )  # fmt: skip
    with progress("reading data") as tell:
        found = read_data(find_data(data, say_once), opened, settings, progress=tell)
    examples = {"train": found.train, "valid": found.valid, "test": found.test}[split]
    if not examples:
        raise FileNotFoundError(f"data: {data} has no {split}.jsonl")
    tokenizer = opened.tokenizer if has_vocabulary(opened.weights.source) else None
    shown = [(example, pieces_of(example, tokenizer)) for example in examples[:count]]
    facts = facts_of(found, examples)
    if as_json:
        click.echo(to_json(facts | {"shown": [as_object(example, pieces) for example, pieces in shown]}))
        return
    for line in found.notes:
        say(line)
    print_examples(shown)
    for line in summary(split, facts):
        click.echo(line)
