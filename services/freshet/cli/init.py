"""`freshet init`: a commented spec for your Avro schemas."""

from __future__ import annotations

from pathlib import Path

import click

from freshet.cli.options import PATH, examples, json_option
from freshet.errors import ConfigError
from freshet.terminal import emit


@click.command(epilog=examples("freshet init --schema impressions.avsc --schema actions.avsc"))
@click.option(
    "--schema",
    "schemas",
    multiple=True,
    required=True,
    type=PATH,
    help="An Avro schema of your events; one each for impressions, actions and, if any, shown items.",
)
@click.option("--name", help="Name of the model; by default from the first schema's name.")
@click.option("--out", type=PATH, default="freshet.toml", show_default=True)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@json_option
def command(schemas: tuple[Path, ...], name: str | None, out: Path, force: bool, as_json: bool) -> None:
    """Write a spec for your schemas, with comments on guesses and alternatives.

    The command also writes freshet.schema.json, which the spec's first line names: TOML editors (taplo, Even
    Better TOML) complete and check keys with it.
    """
    from freshet.config.avro.schema import parse_schema
    from freshet.config.spec.generate import generate_spec
    from freshet.config.spec.json_schema import FILE_NAME, schema_text

    if out.exists() and not out.is_file() and not out.is_dir():
        hint = "a device is not replaced; write a file, then copy it there"
        raise ConfigError("init", "--out", str(out), "the path of a file", hint)
    if out.is_dir():
        hint = f"--out {out / 'freshet.toml'} writes into it"
        raise ConfigError("init", "--out", str(out), "the path of a file, not a folder", hint)
    if out.exists() and not force:
        raise ConfigError("init", "--out", str(out), "a file that does not exist yet", "--force replaces it")
    text = generate_spec(
        [(_seen_from(out, path), parse_schema(_read(path), str(path))) for path in schemas], name
    )
    keys = out.with_name(FILE_NAME)
    _write(keys, schema_text())
    _write(out, f"#:schema ./{FILE_NAME}\n{text}")
    text_out = (
        f"wrote {out}, and {keys} by which editors know its keys\nnext: read it, then `freshet check {out}`"
    )
    emit({"wrote": str(out), "json_schema": str(keys)}, as_json=as_json, text=text_out)


def _read(path: Path) -> bytes:
    from freshet.config.spec.schemas import read_small

    try:
        return read_small(path)
    except OSError as error:
        raise ConfigError(
            "init", "--schema", str(path), "a file that can be read", str(error.strerror)
        ) from None


def _write(out: Path, text: str) -> None:
    """Write the whole file or none of it: without space on the disk the old file stays."""
    from freshet.process.run_state import replace_file

    try:
        replace_file(out.resolve(), text.encode())  # a link stays a link
    except (OSError, RuntimeError) as error:  # RuntimeError: a cycle of links
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError("init", "--out", str(out), "a path that can be written to", why) from error


def _seen_from(out: Path, schema: Path) -> str:
    """Return the schema's path for the spec: relative if the schema is in the spec's folder, else
    absolute."""
    try:
        return str(schema.resolve().relative_to(out.resolve().parent))
    except ValueError:
        return str(schema.resolve())
