"""`netgym tokens`: a corpus as tokens in a file, for the task `text`."""

from __future__ import annotations

import dataclasses
import json
import sys

import click

from exogym_core.app.common_options import debug_flag, plain_json

__all__ = ["tokens"]


@click.command()
@click.argument("corpus", nargs=-1, required=True)
@click.option(
    "--tokenizer", metavar="NAME", required=True, help="A tokenizer.json, or a model of the Hugging Face hub."
)
@click.option("--out", metavar="FILE", required=True, help="Where the tokens go, such as c4.bin.")
@click.option("--config", metavar="NAME", help="Of a data set of the hub, such as en.")
@click.option("--split", metavar="NAME", default="train", show_default=True, help="Of a data set of the hub.")
@click.option("--column", metavar="NAME", default="text", show_default=True, help="The documents' text.")
@click.option("--end", metavar="TOKEN", help="The token after each document.  [the tokenizer's own]")
@click.option("--most", metavar="N", type=click.IntRange(1), help="Stop when there are so many tokens.")
@plain_json
@debug_flag
def tokens(
    corpus: tuple[str, ...],
    tokenizer: str,
    out: str,
    config: str | None,
    split: str,
    column: str,
    end: str | None,
    most: int | None,
    as_json: bool,
) -> None:
    """Make tokens of a CORPUS, streaming: files (.txt, .jsonl, .csv, .parquet), or a data set of the Hugging Face hub.

    It needs the extra: pip install 'netgym[text]'.
    """
    from exogym_core.tasks.tokens import write_tokens

    def show(documents: int, so_far: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{documents} documents, {so_far} tokens", nl=False, err=True)

    names = corpus[0] if len(corpus) == 1 else corpus
    options = {"config": config, "split": split, "column": column, "end": end, "most_tokens": most}
    written = write_tokens(names, out, tokenizer, progress=show, **options)  # type: ignore[arg-type]
    if sys.stderr.isatty():
        click.echo("", err=True)
    if as_json:
        click.echo(json.dumps({"file": out, **dataclasses.asdict(written)}, indent=2))
        return
    ends = f", each with {written.end} at its end" if written.end else ", with nothing between them"
    click.echo(
        f"{written.num_documents} documents{ends}; {written.num_tokens} tokens of {written.vocab_size}"
    )
    wide = ", dtype: uint32" if written.dtype == "uint32" else ""
    click.echo(f"task: {{name: text, paths: {out}, vocab_size: {written.vocab_size}{wide}}}")
    click.echo(out)
