"""The examples in the help of the verbs are command lines that the verbs take."""

import shlex
from pathlib import Path

import click
import pytest

from freshet.cli import cli
from ops.reference.cli_page import examples_of, verbs

EXAMPLES = [
    (name, line)
    for name, command, _ in verbs()
    if not isinstance(command, click.Group)
    for line in examples_of(command)
]


def test_every_verb_has_an_example() -> None:
    without = [n for n, c, _ in verbs() if not isinstance(c, click.Group) and not examples_of(c)]

    assert without == []


@pytest.mark.parametrize(("name", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_each_example_is_taken(name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line.rpartition(" | ")[2].partition(" > ")[0])
    assert words[: 1 + len(name.split())] == ["freshet", *name.split()]
    for word in words[1:]:  # files that the reader has
        if Path(word).suffix and not word.startswith(("-", "http")):
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            Path(word).touch()
    command: click.Command = cli
    context = click.Context(cli, info_name="freshet")
    rest = words[1:]
    while isinstance(command, click.Group):
        found = command.get_command(context, rest.pop(0))
        assert found is not None
        command = found
    if "--json-schema" in rest:
        rest.remove("--json-schema")
        rest.append("freshet.toml")

    with command.make_context(name, list(rest), parent=context) as made:
        assert made.params
