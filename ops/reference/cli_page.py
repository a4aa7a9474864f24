"""The command `freshet`: every verb with its arguments, options and examples, from click."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from freshet.cli import cli
from ops.reference.markdown import code, escaped, grid, header

INTRO = """\
`freshet --help` and `freshet VERB --help` say the same. Every verb takes `--json` and then prints its
result as one JSON object, last; `peek` prints one a line. Settings are environment variables
([settings.md](settings.md)); what the exit status means is in [errors.md](errors.md#exit-status-of-freshet).
"""


def page() -> str:
    """The whole page."""
    return "\n".join(_page()) + "\n"


def verbs() -> Iterator[tuple[str, click.Command, click.Context]]:
    """(`version list`, its command, its context) of every verb, those of groups after their group."""
    yield from _within(cli, click.Context(cli, info_name="freshet"), "")


def _within(
    group: click.Group, context: click.Context, prefix: str
) -> Iterator[tuple[str, click.Command, click.Context]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        yield f"{prefix}{name}", command, inner
        if isinstance(command, click.Group):
            yield from _within(command, inner, f"{prefix}{name} ")


def examples_of(command: click.Command) -> list[str]:
    """The command lines of a verb's examples."""
    lines = (command.epilog or "").splitlines()
    return [line.strip() for line in lines if line.startswith("  ")]


def _page() -> Iterator[str]:
    yield header("The command `freshet`", "the verb's file in services/freshet/cli/") + "\n" + INTRO
    listed = [(f"[`{name}`](#{_anchor(name)})", escaped(_told(c)[0])) for name, c, _ in verbs()]
    yield from grid(listed, ("verb", "what"))
    for name, command, context in verbs():
        yield f"\n## freshet {name}\n"
        yield "\n\n".join(_told(command)) + "\n"
        usage = " ".join(command.collect_usage_pieces(context))
        yield f"```text\nfreshet {name} {usage}\n```\n"
        rows = list(_parameters(command, context))
        if rows:
            yield from grid(rows, ("argument or option", "value", "default", "what"))
        found = examples_of(command)
        if found:
            yield "\n```sh\n" + "\n".join(found) + "\n```"


def _anchor(name: str) -> str:
    return f"freshet-{name.replace(' ', '-')}"


def _told(command: click.Command) -> list[str]:
    """The help as paragraphs, each on one line."""
    text = inspect.cleandoc(command.help or "").replace("\b", "")
    return [" ".join(p.split()) for p in re.split(r"\n\s*\n", text) if p.strip()]


def _parameters(command: click.Command, context: click.Context) -> Iterator[tuple[str, ...]]:
    for p in command.params:
        told = p.to_info_dict()
        if isinstance(p, click.Argument):
            what = "needed" if p.required else ""
            yield (code(p.make_metavar(context)), _type(p), "", what)
        elif isinstance(p, click.Option) and not p.hidden:
            names = ", ".join([*p.opts, *p.secondary_opts])
            value = "" if p.is_flag else _type(p)
            doc = (p.help or "").partition("  [default")[0]
            needed = " Needed." if p.required else ""
            many = " May be repeated." if p.multiple and "repeat" not in doc and "each" not in doc else ""
            yield (code(names), value, code(_default(told)), escaped(doc + needed + many))


def _type(p: click.Parameter) -> str:
    kind = p.type
    if isinstance(kind, click.Choice):
        return " or ".join(code(str(c)) for c in kind.choices)
    if isinstance(kind, click.IntRange | click.FloatRange):
        low, high = kind.min, kind.max
        return f"{low} to {high}" if high is not None else f"at least {low}"
    if isinstance(kind, click.Path | click.File):
        return "path"
    if isinstance(kind, click.DateTime):
        return "time, `2026-01-31T12:00:00`"
    words = {"integer": "integer", "float": "number"}
    return (
        words.get(kind.name, (p.metavar or "").lower() if isinstance(p, click.Option) else "text") or "text"
    )


def _default(told: dict[str, object]) -> str:
    value = told.get("default")
    if (
        value is None
        or value is False
        or value in ("", (), [])
        or (told.get("is_flag") and value is not True)
    ):
        return ""
    return str(value) if "UNSET" not in str(value).upper() else ""
