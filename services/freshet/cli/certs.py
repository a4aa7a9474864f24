"""`freshet certs FOLDER NAME...`: certificates for services, signed by an authority of one's own."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from freshet.cli.options import PATH, examples, json_option
from freshet.errors import ConfigError
from freshet.terminal import emit, table

if TYPE_CHECKING:
    from freshet.cli.certificate_authority import Issued

__all__ = ["command"]

DAYS = 90
RENEW_WITHIN = 30
CA_DAYS = 3650

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")


@click.command(
    epilog=examples(
        "freshet certs certs shard-0 embedder-0 trainer-0",
        "freshet certs certs shard-0 --host shard-0.internal --host 10.0.0.3",
        "freshet certs certs shard-0 shard-1 --host shard-0=10.0.0.3 --host shard-1=10.0.0.4",
        "freshet certs --check certs",
    )
)
@click.argument("folder", type=PATH)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="[NAME=]HOST",
    help="Another name or address that a service is reached by; NAME= says whose, if there are several. May "
    "be given again.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=DAYS,
    show_default=True,
    help="How long a certificate is valid.",
)
@click.option(
    "--renew-within",
    type=click.IntRange(0, 3650),
    default=RENEW_WITHIN,
    show_default=True,
    help="Days before its end in which a certificate is made again.",
)
@click.option(
    "--ca-days",
    type=click.IntRange(1, 36500),
    default=CA_DAYS,
    show_default=True,
    help="How long the authority is valid, if it is made now.",
)
@click.option("--check", is_flag=True, help="Make nothing: say when the certificates of FOLDER expire.")
@json_option
def command(
    folder: Path,
    names: tuple[str, ...],
    hosts: tuple[str, ...],
    days: int,
    renew_within: int,
    ca_days: int,
    check: bool,
    as_json: bool,
) -> None:
    """Make a certificate and key for each NAME, signed by an authority that FOLDER keeps.

    A certificate is for server and client, valid for NAME itself, localhost, and each --host of it. What is
    there and good stays as it is; what expires within --renew-within days is made again, so a timer may run
    this daily. Services read renewed files by themselves. For development and small deployments: who can
    read FOLDER/ca.key can be any service.
    """
    if check:
        _check(folder, names, renew_within, as_json)
        return
    if not names:
        raise click.UsageError("expected names of services or hosts, such as shard-0; or --check")
    for name in names:
        if name == "ca" or not _NAME.fullmatch(name):
            raise ConfigError(
                "certs", "NAME", name, "1 to 64 letters, digits, . - and _, other than ca",
                "addresses and further names are given by --host",
            )  # fmt: skip
    if renew_within >= days:
        raise ConfigError(
            "certs", "--renew-within", renew_within, f"fewer than the {days} of --days",
            "else each run makes every certificate again",
        )  # fmt: skip
    of_name = _by_name(names, hosts)
    from freshet.cli.certificate_authority import LOCAL, opened

    with opened(folder, days=ca_days) as (authority, ca):
        made = [
            authority.issue(
                name,
                tuple(dict.fromkeys((name, *LOCAL, *of_name[name]))),
                days=days,
                renew_within=renew_within,
            )
            for name in names
        ]
    all_of_them = [ca, *made]
    emit(
        {"folder": str(folder), "certificates": [_told(one) for one in all_of_them]},
        as_json=as_json,
        text="\n".join([*map(_line, all_of_them), "", *_settings(folder, made)]),
    )


def _by_name(names: tuple[str, ...], hosts: tuple[str, ...]) -> dict[str, list[str]]:
    """Hosts of each name. Raises ConfigError: one is of no name, or might be meant for all.

    A certificate for another's host lets who has its key answer in that one's place.
    """
    found: dict[str, list[str]] = {name: [] for name in names}
    for given in hosts:
        name, _, host = given.rpartition("=")
        if name not in found and (name or len(names) > 1):
            raise ConfigError(
                "certs", "--host", given, f"NAME=HOST, NAME one of {', '.join(names)}",
                "whoever has a certificate for a host can answer as that host: give each to one name",
            )  # fmt: skip
        found[name or names[0]].append(host)
    return found


def _told(one: Issued) -> dict[str, Any]:
    return {
        "name": one.name,
        "expires": one.expires.isoformat(),
        "hosts": list(one.hosts),
        "made_because": one.made or None,
    }


def _line(one: Issued) -> str:
    done = f"made, as {one.made}" if one.made else "stays as it was"
    hosts = f"; for {', '.join(one.hosts)}" if one.hosts else ""
    return f"{one.name}  {done}; until {one.expires:%Y-%m-%d}{hosts}"


def _settings(folder: Path, made: list[Issued]) -> list[str]:
    name = made[0].name if len(made) == 1 else "NAME"
    at = folder.absolute()
    files = (("CA_FILE", "ca.pem"), ("CERT_FILE", f"{name}.pem"), ("KEY_FILE", f"{name}.key"))
    lines = ["each service gets ca.pem and the two files of its own name; ca.key stays here. Set at each:"]
    lines += [f"  FRESHET_GRPC_{option}={at / file}" for option, file in files]
    return lines


def _check(folder: Path, names: tuple[str, ...], renew_within: int, as_json: bool) -> None:
    """Raises ConfigError if one has expired or is missing."""
    from freshet.cli.certificate_authority import certificates_in

    now = datetime.now(UTC)
    found = {name: one.not_valid_after_utc for name, one in certificates_in(folder)}
    missing = [name for name in names or ["ca"] if name not in found]
    if missing:
        raise ConfigError(
            "certs", "", f"{folder} holds no {missing[0]}.pem", "certificates that `freshet certs` made"
        )
    days = {name: (end - now).total_seconds() / 86_400 for name, end in found.items()}
    said = {n: "expired" if d <= 0 else "renew it" if d < renew_within else "good" for n, d in days.items()}
    rows = [[n, f"{found[n]:%Y-%m-%d %H:%M}", f"{days[n]:.1f}", said[n]] for n in found]
    emit(
        {"certificates": {n: {"expires": found[n].isoformat(), "days": days[n]} for n in found}},
        as_json=as_json,
        text=table(["certificate", "valid until (UTC)", "days", ""], rows),
    )
    expired = [name for name, left in days.items() if left <= 0]
    if expired:
        what = " ".join(expired)
        hint = (
            "an authority is made in another folder, with all certificates"
            if "ca" in expired
            else f"`freshet certs {folder} {what}` makes them again"
        )
        raise ConfigError("certs", "", f"expired: {what}", "certificates that are valid", hint)
