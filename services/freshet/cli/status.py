"""`freshet status`: services, progress, freshness of the served model, and ended processes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from freshet.apps.status import collect, collect_listed
from freshet.cli.options import examples, folder_option, json_option
from freshet.errors import Corrupt, Unavailable
from freshet.observability.losses import losses_text
from freshet.terminal import emit, table

REPORTED_AHEAD_MS = 60_000
"""Event time further ahead than this is reported: the default limit of a single event's date."""

SOURCE_NAMES = {"random": "served, random slates", "popularity": "popularity, the baseline"}
SHOWN_MEASURES = ("n", "auc", "ne", "calibration", "mse")
SHOWN_ENDINGS = 8
"""Ended processes that fit on one screen with the rest; `--json` lists all."""


def as_text(status: Mapping[str, Any], now_ms: int | None = None) -> str:
    """Format the status in lines, with ages as of `now_ms` (None: the clock's time)."""
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    services = status["services"]
    if "folder" not in status:
        listed = [[name, s["address"], s["state"], s["reason"]] for name, s in services.items()]
        lines = [table(["service", "address", "state", "note"], listed), ""]
        if "state_damaged" in status:
            lines.append("the state of this run cannot be read; services at the ports of the settings:")
            lines.append(f"  {status['state_damaged']}")
        return "\n".join([*lines, *_figures(services, status["versions"])]).rstrip()
    if not services:
        return (
            f"nothing has run in {status['folder']} yet; "
            f"`freshet up SPEC --folder {status['folder']}` starts it"
        )
    header = ["service", "state", "pid", "port", "up s", "restarts", "MB", "note"]
    columns = ("state", "pid", "port", "up_s", "restarts", "memory_mb")
    rows = [[name, *(s[c] for c in columns), s["reason"] or s["last_exit"]] for name, s in services.items()]
    lines = [table(header, rows), *_supervisor(status.get("supervisor"), now_ms), ""]
    lines += _figures(services, status["versions"])
    lines += _history(status.get("history", ()), now_ms)
    return "\n".join(lines).rstrip()


def _supervisor(supervisor: Mapping[str, Any] | None, now_ms: int) -> Iterator[str]:
    if supervisor is None or supervisor["state"] == "running":
        return
    at = clock_of(supervisor["time_ms"], now_ms)
    if supervisor["state"] == "stopped":
        yield f"stopped {at}; everything is kept"
    else:
        yield f"the supervisor (process {supervisor['pid']}) was killed, or the machine went down: {at}"
        yield "  its services ended with it; what was acknowledged is on disk"
    if supervisor["again"]:
        yield f"  `{supervisor['again']}` goes on where it was"


def _figures(services: Mapping[str, Any], versions: Mapping[str, Any]) -> Iterator[str]:
    listed_figures = [
        (name, service.get("role", name), service.get("figures", {})) for name, service in services.items()
    ]
    for name, role, joiner in listed_figures:
        if role == "joiner" and joiner:
            counts = f"{joiner.get('samples', 0)} samples of {joiner.get('events', 0)} events"
            yield f"joined    {counts} since the joiner was started{_which(name, role)}"
            yield from (f"{line}{_which(name, role)}" for line in _event_lines(joiner))
            if note := joiner.get("partitions", {}).get("note"):
                yield f"topics    {note}{_which(name, role)}"
            for reason in joiner.get("placing", {}).get("trouble", {}).values():
                yield f"clients   {reason}{_which(name, role)}"
            yield from _lost(joiner, _which(name, role))
    for name, role, trainer in listed_figures:
        if role in ("trainer", "embedder"):
            yield from _learned(role, trainer, _which(name, role))
            yield from _wires(trainer, _which(name, role))
    if versions["newest"] is not None:
        why = f" ({versions['reason']})" if versions["reason"] else ""
        aliases = ", ".join(f"{alias} {number}" for alias, number in versions["aliases"].items()) or "none"
        yield f"versions  newest {versions['newest']} {versions['verdict']}{why}; aliases: {aliases}"
    for alias, damage in versions.get("damaged", {}).items():
        yield f"aliases   {alias} is damaged: {damage}"
    for name, _, figures in listed_figures:
        for kind, left_out in figures.get("skipped", {}).items():
            yield f"left out  {name}: {left_out['count']} damaged of {kind}: {left_out['newest']}"
    for name, role, inference in listed_figures:
        if role == "inference" and inference:
            fresh = inference.get("freshness_ms")
            fresh_to = "has not learned yet" if fresh is None else f"fresh to {fresh} ms"
            yield f"serving   version {inference.get('version')}, {fresh_to}{_which(name, role)}"
            yield from _lost(inference, _which(name, role))


def _lost(figures: Mapping[str, Any], which: str) -> Iterator[str]:
    """Yield the shares of events from which nothing was learned."""
    losses = figures.get("losses", {})
    for line in losses_text(losses.get("recent"), losses.get("begun")):
        yield f"lost      {line}{which}"


def _learned(role: str, figures: Mapping[str, Any], which: str) -> Iterator[str]:
    """Yield the samples that could not be used, by reason, and the progress of a trainer."""
    refused = {why: count for why, count in figures.get("refused", {}).items() if count}
    if refused:
        reasons = ", ".join(f"{why} {count}" for why, count in refused.items())
        yield (
            f"lost      {sum(refused.values())} samples could not be used ({reasons}) since the {role} was "
            f"started; <model>.refused has them with their reasons{which}"
        )
    if role == "trainer" and figures:
        yield from _trained(figures, which)


SHOWN_LINKS = 8


def _wires(figures: Mapping[str, Any], which: str) -> Iterator[str]:
    """Yield the codecs of a process's links with their reasons, and what they save and cost on each wire."""
    links = figures.get("codecs", {})
    for address, ways in [*links.items()][:SHOWN_LINKS]:
        choices = "; ".join(f"{way} {choice['codec']}: {choice['why']}" for way, choice in ways.items())
        yield f"link      {address}: {choices}{which}"
    if len(links) > SHOWN_LINKS:
        yield f"          {len(links) - SHOWN_LINKS} more links; --json has them"
    for wire, groups in figures.get("wires", {}).items():
        carried = [counts for codecs in groups.values() for counts in codecs.values()]
        raw, sent, rows = (sum(c[key] for c in carried) for key in ("bytes_raw", "bytes_wire", "rows"))
        errors = [c["relative_error"] for c in carried if c["relative_error"] is not None]
        if 0 < sent < raw:
            error = f", relative error up to {max(errors):.2%}" if errors else ""
            coding_ns = 1e9 * sum(c["encode_s"] + c["decode_s"] for c in carried) / rows
            yield (
                f"          {wire}: {raw / sent:.1f} times shorter than fp32{error}; "
                f"encoding and decoding take {coding_ns:.0f} ns a {'sum' if wire == 'dense' else 'row'}"
            )


def _event_lines(joiner: Mapping[str, Any]) -> Iterator[str]:
    """Yield effects of wrong clocks and of values out of bounds on a joiner's events."""
    events = joiner.get("ledger", {}).get("events", {})
    if late := events.get("impressions_late", 0):
        share = late / (late + events.get("impressions", 0))
        yield f"late      {late} impressions ({share:.1%}) came after their windows closed: not learned"
    if bad := sum(counts.get("bad_time", 0) for counts in joiner.get("refused", {}).values()):
        first = "".join(f": {text}" for text in [*joiner.get("bad_times", {}).values()][:1])
        yield f"times     {bad} events are dated wrongly, since the joiner was started{first}"
    for label, samples in joiner.get("out_of_bounds", {}).items():
        if samples:
            yield (
                f"bounds    {samples} values of label {label} lie outside of its bounds and are not learned, "
                "since the joiner was started"
            )
    marks = [w for w in joiner.get("watermark_ms", {}).values() if w is not None]
    ahead_ms = max(marks, default=0) - joiner.get("now_ms", 0)
    if joiner.get("now_ms") and ahead_ms > REPORTED_AHEAD_MS:
        yield (
            f"clock     event time is {ahead_ms / 1000:.0f} s ahead of now: a clock was wrong, and current "
            "events are late until then"
        )
    if step_ms := joiner.get("clock_step_ms", 0):
        step_s = f"{step_ms / 1000:+.0f}"
        yield f"clock     the joiner's wall clock was set by {step_s} s; its earlier time still counts"
    if disputed := joiner.get("disputed_ms", {}):
        yield (
            f"clock     {len(disputed)} partitions wait: an event is dated "
            f"{max(disputed.values()) / 1000:.0f} s ahead, and clocks disagree on that"
        )


def _which(name: str, role: str) -> str:
    """Return the instance's name in brackets if it differs from its role."""
    return "" if name == role else f" ({name})"


def _trained(trainer: Mapping[str, Any], which: str) -> Iterator[str]:
    rows = f"{sum(trainer['rows'].values())} rows; " if trainer.get("rows") else ""  # in its own process
    yield (
        f"trained   {trainer.get('samples', 0)} samples in {trainer.get('steps', 0)} steps; {rows}"
        f"{trainer.get('lag_blocks', 0)} blocks behind{which}"
    )
    if error := trainer.get("version_error"):
        yield f"  no version could be written: {error}"
    for of, labels in trainer.get("measures", {}).items():
        yield from _measures(of, labels, trainer.get("lately", {}).get(of, {}))


_Figures = Mapping[str, float | None]


def _measures(of: str, labels: Mapping[str, _Figures], lately: Mapping[str, _Figures]) -> Iterator[str]:
    """Yield a line per label with the main measures, overall and over the last windows; `--json` has the
    rest."""
    for label, values in labels.items():
        parts = _parts(values)
        if parts:
            now = _parts(lately.get(label, {}))
            text = ", ".join(parts) + (f"; lately {', '.join(now)}" if now else "")
            yield f"          {label}, {SOURCE_NAMES.get(of, of)}: {text}"


def _parts(values: _Figures) -> list[str]:
    known = [(name, values.get(name)) for name in SHOWN_MEASURES]
    return [
        f"{name} {value:.0f}" if name == "n" else f"{name} {value:.3f}"
        for name, value in known
        if value is not None
    ]


def _history(history: Sequence[Mapping[str, Any]], now_ms: int) -> Iterator[str]:
    if not history:
        return
    yield "\nwhat ended, the newest last"
    if len(history) > SHOWN_ENDINGS:
        yield f"  ... {len(history) - SHOWN_ENDINGS} before; --json has them"
    for one in history[-SHOWN_ENDINGS:]:
        ran = f" after {one['up_s']:.1f} s" if one["up_s"] is not None else ""
        again = one["again_ms"]
        then = (
            f"; started again {(again - one['time_ms']) / 1000:.1f} s later"
            if again is not None
            else "; not started again"
        )
        yield f"  {clock_of(one['time_ms'], now_ms)}  {one['name']:10} {one['how']}{ran}{then}"
        yield from (f"      {line}" for line in one["why"].splitlines())


def clock_of(time_ms: int, now_ms: int) -> str:
    """Format as `12:03:07 (5 s ago)` in local time; as a date and time if older than twelve hours."""
    ago = max(0, now_ms - time_ms) / 1000
    moment = datetime.fromtimestamp(time_ms / 1000)
    if ago >= 12 * 3600:
        return moment.strftime("%Y-%m-%d %H:%M:%S")
    span = f"{ago:.0f} s" if ago < 120 else f"{ago / 60:.0f} min" if ago < 7200 else f"{ago / 3600:.0f} h"
    return f"{moment:%H:%M:%S} ({span} ago)"


@click.command(
    epilog=examples(
        "freshet status",
        "freshet status --folder news-run --json",
        "freshet status --services gateway=gateway-0:7000,joiner=joiner-0:7010",
    )
)
@folder_option
@click.option(
    "--services",
    metavar="LIST",
    help="Query these, role=host:port with commas between, instead of a run folder's. Without a run in the "
    "folder the default is FRESHET_CONSOLE_SERVICES.",
)
@json_option
def command(folder: Path, services: str | None, as_json: bool) -> None:
    """Show the services of a run folder, their progress, the freshness of the served model, and ended
    processes; or the state of services on other machines or in containers."""
    from freshet.config.settings import load_settings

    if services is None and not _has_run(folder):
        services = load_settings(run_folder=folder).console.services
    status = collect_listed(folder, services) if services else collect(folder)
    emit(status, as_json=as_json, text=as_text(status))


def _has_run(folder: Path) -> bool:
    """Return whether `freshet up` ever ran in the folder."""
    from freshet.config.settings import RunFolder
    from freshet.process.run_state import read_run

    try:
        return folder.is_dir() and read_run(RunFolder(folder)) is not None
    except (Corrupt, Unavailable):
        return True
