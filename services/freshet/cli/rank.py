"""`freshet rank`: ask a running inference server to rank candidates."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO

import click
import orjson

from freshet.cli.options import emit, folder_option, json_option, table
from freshet.errors import BadInput, ConfigError

__all__ = ["command"]


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
        raise BadInput(f"the request must be one JSON object: {error}") from None
    with Client(inference=url or _url_of(folder)) as client:
        ranking = client.rank(request.get("context", {}), request.get("candidates", []), k=request.get("k"))
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


def _url_of(folder: Path) -> str:
    from freshet.runtime.supervisor import read_state
    from freshet.settings import RunFolder

    state = read_state(RunFolder(folder))
    if "inference" not in state:
        raise ConfigError(
            "rank",
            "--folder",
            str(folder),
            "a run folder whose inference server runs",
            "freshet up SPEC starts one",
        )
    return f"http://127.0.0.1:{state['inference']['port']}"
