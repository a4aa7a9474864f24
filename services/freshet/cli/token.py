"""`freshet token`: create, list and drop the tokens of clients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from freshet.cli.options import PATH, examples, json_option
from freshet.errors import ConfigError
from freshet.terminal import emit, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from freshet.http.tokens import TokenEntry
    from freshet.observability.audit import Audit

SCOPES = "send,rank,operate"


@click.group()
def command() -> None:
    """Create, list and drop the tokens of clients.

    A file holds name, scopes and hash of each, one per line. Gateway, inference and console read the file
    FRESHET_COMMON_TOKENS_FILE, and apply a change within a second.
    """


def _file_option(verb: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--file",
        "path",
        type=PATH,
        envvar="FRESHET_COMMON_TOKENS_FILE",
        required=True,
        help="The file of tokens; by default FRESHET_COMMON_TOKENS_FILE.",
    )(verb)


@command.command(
    "new",
    epilog=examples(
        "freshet token new web-shop --scopes send,rank --file tokens",
        "freshet token new ada --scopes operate --expires 90d --file tokens",
    ),
)
@click.argument("name")
@click.option("--scopes", required=True, help=f"Permissions: some of {SCOPES}.")
@click.option("--expires", metavar="DURATION", help="Validity, such as 90d.  [default: for ever]")
@_file_option
@json_option
def new(name: str, scopes: str, expires: str | None, path: Path, as_json: bool) -> None:
    """Create a token, add its hash to the file, and print it; it is stored nowhere.

    A name may have several tokens, so that clients can change to a new one before the old one is dropped. A
    missing file is created, readable by its owner only.
    """
    from freshet.clock import SYSTEM_CLOCK
    from freshet.http.token_files import edit_tokens
    from freshet.http.tokens import TokenEntry, digest_of, new_token, time_text
    from freshet.observability.audit import os_user

    expires_ms = None if expires is None else SYSTEM_CLOCK.now_ms() + _duration_ms(expires)
    token = new_token()
    entry = TokenEntry(_name(name), _scopes(scopes), digest_of(token.encode()), expires_ms)
    with _audit(path).of("token new", os_user(), {"file": str(path), **_value(entry)}):
        edit_tokens(path, lambda lines: ([*lines, entry], None))
    until = "" if expires_ms is None else f", until {time_text(expires_ms)}"
    click.echo(f"{name} may {scopes.replace(',', ', ')}{until}; {path} has its hash", err=True)
    emit({**_value(entry), "token": token}, as_json=as_json, text=token)


@command.command("list", epilog=examples("freshet token list --file tokens"))
@_file_option
@json_option
def list_tokens(path: Path, as_json: bool) -> None:
    """List the tokens of the file with scopes and expiry."""
    from freshet.clock import SYSTEM_CLOCK
    from freshet.http.token_files import read_tokens

    entries, now_ms = read_tokens(path), SYSTEM_CLOCK.now_ms()
    rows = [
        [v["name"], v["id"], ",".join(v["scopes"]), v["expires"] or "never", _state(e, now_ms)]
        for e, v in zip(entries, map(_value, entries), strict=True)
    ]
    text = table(["name", "id", "scopes", "expires", "state"], rows) if rows else f"{path} has no token"
    emit({"tokens": [*map(_value, entries)]}, as_json=as_json, text=text)


@command.command(
    "drop",
    epilog=examples(
        "freshet token drop web-shop --file tokens", "freshet token drop web-shop --id 9f86d081 --file tokens"
    ),
)
@click.argument("name")
@click.option("--id", "id_", help="Id of one of several tokens, as `freshet token list` shows it.")
@_file_option
@json_option
def drop(name: str, id_: str | None, path: Path, as_json: bool) -> None:
    """Remove a name's tokens, or one of them, from the file; services then refuse requests with them."""
    from freshet.http.token_files import edit_tokens
    from freshet.observability.audit import os_user

    def without(entries: Sequence[TokenEntry]) -> tuple[list[TokenEntry], list[TokenEntry]]:
        gone = [e for e in entries if e.name == name and id_ in (None, e.id)]
        return [e for e in entries if e not in gone], gone

    details: dict[str, Any] = {"file": str(path), "name": name, "id": id_}
    if not path.exists():
        raise ConfigError("token", "--file", str(path), "a file of tokens", "`freshet token new` creates one")
    with _audit(path).of("token drop", os_user(), details):
        gone = edit_tokens(path, without, must_exist=True)
        details["ids"] = [entry.id for entry in gone]
        if not gone:
            raise ConfigError(
                "token", "NAME" if id_ is None else "--id", name if id_ is None else f"{name} {id_}",
                f"a token of {path}", f"`freshet token list --file {path}` shows them",
            )  # fmt: skip
    said = ", ".join(f"{e.name} {e.id}" for e in gone)
    emit({"dropped": [*map(_value, gone)]}, as_json=as_json, text=f"dropped: {said}")


def _audit(path: Path) -> Audit:
    """Open the audit log of the settings; else of the run folder, if it exists; else one beside the file."""
    from freshet.config.settings import load_settings
    from freshet.observability.audit import Audit

    common = load_settings().common
    there = common.audit_file or common.run.path.is_dir()
    return Audit(common.audit if there else path.with_name(f"{path.name}.audit.jsonl"))


def _name(text: str) -> str:
    from freshet.http.tokens import NAME, NAME_TEXT

    if not NAME.fullmatch(text):
        raise ConfigError("token", "NAME", text, NAME_TEXT)
    return text


def _scopes(text: str) -> frozenset[Any]:
    from freshet.http.tokens import Scope

    found = text.split(",")
    if not set(found) <= set(get_args(Scope)) or len(set(found)) != len(found):
        raise ConfigError("token", "--scopes", text, f"some of {SCOPES}, commas between")
    return frozenset(found)


def _duration_ms(text: str) -> int:
    from freshet.config.options import Duration, Section

    longest = Duration(1_000, 100 * 365 * 86_400_000)
    return int(Section("token", "", {"--expires": text}).read_value("--expires", longest))


def _value(entry: TokenEntry) -> dict[str, Any]:
    from freshet.http.tokens import SCOPES as ORDER
    from freshet.http.tokens import time_text

    return {
        "name": entry.name,
        "id": entry.id,
        "scopes": [scope for scope in ORDER if scope in entry.scopes],
        "expires": None if entry.expires_ms is None else time_text(entry.expires_ms),
    }


def _state(entry: TokenEntry, now_ms: int) -> str:
    return "expired" if entry.expires_ms is not None and entry.expires_ms <= now_ms else "valid"
