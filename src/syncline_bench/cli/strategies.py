"""The command ``syncline strategies``: lists the vocabulary of strategies, and the presets."""

from __future__ import annotations

import click


@click.command()
def strategies() -> None:
    """List the words of strategies with a sentence on each, and the presets, which name whole strategies."""
    from syncline.strategy.words import PRESETS, vocabulary

    words = vocabulary()
    for word in dict.fromkeys(item.word for item in words):
        click.secho(word, bold=True)
        for item in words:
            if item.word == word:
                click.echo(f"  {item.text}\n      {item.summary}" if item.summary else f"  {item.text}")
    click.secho("presets", bold=True)
    for preset in PRESETS.values():
        noted = f"; {preset.note}" if preset.note else ""
        click.echo(f"  {preset.name}\n      {preset.text}{noted}\n      {preset.summary} [{preset.source}]")
