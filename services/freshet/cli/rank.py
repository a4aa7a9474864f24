"""`freshet rank`: rank candidates with a running inference server."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
import orjson

from freshet.cli.options import examples, folder_option, json_option
from freshet.errors import BadInput, ConfigError, Corrupt, Unavailable
from freshet.json_text import kind_of
from freshet.process.run_state import existing_folder
from freshet.terminal import emit, table

if TYPE_CHECKING:
    from freshet.client import Ranking, Rows

EXAMPLE = (
    'such as {"context": {"reader": "u1"}, "candidates": [{"article": "a7", "topic": "music"}], "k": 10}'
)


@click.command(
    epilog=examples(
        "freshet rank request.json",
        'echo \'{"context": {"reader": "u1"}, "candidates": [{"article": "a7", "topic": "film"}]}\''
        " | freshet rank",
    )
)
@click.argument("request_file", type=click.File("rb"), default="-")
@folder_option
@click.option("--url", help="Inference server; by default that of the run folder.")
@click.option("--dry-run", is_flag=True, help="Neither log the ranking as served nor explore.")
@click.option("--explain", is_flag=True, help="Show how many rows each item has, and their age.")
@json_option
def command(
    request_file: IO[bytes], folder: Path, url: str | None, dry_run: bool, explain: bool, as_json: bool
) -> None:
    """Rank the candidates of a JSON request {"context": {...}, "candidates": [{...}], "k": 10}.

    REQUEST_FILE is a path, or - for standard input.
    """
    from freshet.client import Client
    from freshet.config.settings import load_settings
    from freshet.http import tls
    from freshet.http.token_files import read_token

    if request_file.name == "<stdin>" and sys.stdin.isatty():
        click.echo('type {"context": {...}, "candidates": [{...}]} and end with Ctrl-D', err=True)
    try:
        request = orjson.loads(request_file.read())
    except orjson.JSONDecodeError as error:
        raise BadInput(f"the request must be one JSON object: {error}\n  {EXAMPLE}") from None
    if not isinstance(request, dict):
        raise BadInput(f"the request must be one JSON object, found {kind_of(request)}; {EXAMPLE}")
    settings = load_settings(run_folder=folder)
    tls.use(settings)
    token = read_token(settings.common.client_token_file)
    at = _checked(url) if url else _url_of(folder)
    with Client(inference=at, token=token, **tls.client_files()) as client:
        try:
            ranking = client.rank(
                request.get("context", {}),
                request.get("candidates", []),
                k=request.get("k"),
                request_id=request.get("request_id"),
                dry_run=dry_run or request.get("dry_run") is True,
                explain=explain or request.get("explain") is True,
            )
        except Unavailable as error:
            look = "is --url right?" if url else f"`freshet status --folder {folder}` says how it is"
            raise Unavailable(f"{error}\n  {look}") from error
    emit(_value(ranking), as_json=as_json, text=_text(ranking))


def _text(ranking: Ranking) -> str:
    labels = list(ranking.items[0].predictions) if ranking.items else []
    features = list(ranking.items[0].rows or ()) if ranking.items else []
    lines = [
        [i, item.index, item.score, *item.predictions.values(), *map(_rows_text, (item.rows or {}).values())]
        for i, item in enumerate(ranking.items, 1)
    ]
    text = table(["place", "candidate", "score", *labels, *features], lines)
    fresh = ranking.freshness_ms
    text += f"\nversion {ranking.version}, "
    text += "which has not learned yet" if fresh is None else f"fresh to {fresh} ms"
    text += f", unknown {dict(ranking.unknown_rows)}" if ranking.unknown_rows else ""
    if ranking.defaulted_rows:
        text += f", of which rows on disk were not read in time {dict(ranking.defaulted_rows)}"
    if features:
        text += "\nunder a feature: how many of its values have a row, and how old the newest is"
    return text


def _rows_text(rows: Rows) -> str:
    age = "" if rows.age_s is None else f", {rows.age_s} s"
    return f"{rows.known} of {rows.of}{age}" if rows.of else "null"


def _value(ranking: Ranking) -> dict[str, Any]:
    return {
        "items": [
            {
                "index": item.index,
                "score": item.score,
                "predictions": dict(item.predictions),
                "propensity": item.propensity,
                **({} if item.rows is None else {"rows": {n: asdict(r) for n, r in item.rows.items()}}),
            }
            for item in ranking.items
        ],
        "version": ranking.version,
        "freshness_ms": ranking.freshness_ms,
        "unknown_rows": dict(ranking.unknown_rows),
        "defaulted_rows": dict(ranking.defaulted_rows),
    }


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError("rank", "--url", url, "a URL such as http://127.0.0.1:7001")
    return url


def _url_of(folder: Path) -> str:
    from freshet.config.settings import RunFolder, load_settings
    from freshet.http import tls
    from freshet.http.addresses import Address
    from freshet.process.run_state import read_state

    try:
        state = read_state(RunFolder(existing_folder(folder)))
    except (Corrupt, Unavailable):  # `freshet status` reports it; the settings name the port, too
        settings = load_settings(run_folder=folder)
        if not settings.inference.port:  # 0: any free port
            raise
        return f"{tls.scheme()}://{Address('127.0.0.1', settings.inference.port)}"
    if "inference" not in state:
        raise ConfigError(
            "rank",
            "--folder",
            str(folder),
            "a run folder in which an inference server has run",
            f"`freshet up SPEC --folder {folder}` starts one; --url names one elsewhere",
        )
    found = state["inference"]
    return f"{tls.scheme()}://{Address(found['host'], found['port'])}"
