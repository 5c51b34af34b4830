"""What the verbs on adapters share."""

import click

force_option = click.option("--force", is_flag=True, help="Replace TARGET when it exists.")
any_base_option = click.option(
    "--any-base", is_flag=True, help="Accept an adapter that was made for another base, by name or by numbers."
)
