"""`freshet rank`: ask a running inference server to rank candidates."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO

import click
import orjson

from freshet.cli.options import emit, existing_folder, folder_option, json_option, table
from freshet.errors import BadInput, ConfigError, Unavailable

__all__ = ["command"]

EXAMPLE = 'such as {"context": {"reader": "u1"}, "candidates": [{"article": "a7"}], "k": 10}'


@click.command()
@click.argument("request_file", type=click.File("rb"), default="-")
@folder_option
@click.option("--url", help="Inference server; without it, the one of the run folder.")
@json_option
def command(request_file: IO[bytes], folder: Path, url: str | None, as_json: bool) -> None:
    """Rank the candidates of a JSON request {"context": {...}, "candidates": [{...}], "k": 10}.

    REQUEST_FILE is a path, or - for standard input.
    """
    from freshet.client import Client

    if request_file.name == "<stdin>" and sys.stdin.isatty():
        click.echo('type {"context": {...}, "candidates": [{...}]} and end with Ctrl-D', err=True)
    try:
        request = orjson.loads(request_file.read())
    except orjson.JSONDecodeError as error:
        raise BadInput(f"the request must be one JSON object: {error}\n  {EXAMPLE}") from None
    if not isinstance(request, dict):
        raise BadInput(f"the request must be one JSON object, found {type(request).__name__}; {EXAMPLE}")
    with Client(inference=_checked(url) if url else _url_of(folder)) as client:
        try:
            ranking = client.rank(
                request.get("context", {}), request.get("candidates", []), k=request.get("k")
            )
        except Unavailable as error:
            look = "is --url right?" if url else f"`freshet status --folder {folder}` says how it is"
            raise Unavailable(f"{error}\n  {look}") from error
    rows = [[n + 1, i.index, i.score, *i.predictions.values()] for n, i in enumerate(ranking.items)]
    labels = list(ranking.items[0].predictions) if ranking.items else []
    text = table(["place", "candidate", "score", *labels], rows)
    text += f"\nversion {ranking.version}, fresh to {ranking.freshness_ms} ms"
    text += f", unknown {dict(ranking.unknown_rows)}" if ranking.unknown_rows else ""
    value = {
        "items": [
            {
                "index": i.index,
                "score": i.score,
                "predictions": dict(i.predictions),
                "propensity": i.propensity,
            }
            for i in ranking.items
        ],
        "version": ranking.version,
        "freshness_ms": ranking.freshness_ms,
        "unknown_rows": dict(ranking.unknown_rows),
    }
    emit(value, as_json=as_json, text=text)


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError("rank", "--url", url, "a URL such as http://127.0.0.1:7001")
    return url


def _url_of(folder: Path) -> str:
    from freshet.runtime.run_state import read_state
    from freshet.settings import RunFolder

    state = read_state(RunFolder(existing_folder(folder)))
    if "inference" not in state:
        raise ConfigError(
            "rank",
            "--folder",
            str(folder),
            "a run folder in which an inference server has run",
            f"`freshet up SPEC --folder {folder}` starts one; --url names one that runs elsewhere",
        )
    return f"http://127.0.0.1:{state['inference']['port']}"
