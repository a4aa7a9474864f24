"""`freshet check SPEC`: explain a spec, or list the edits to a running model that need a new one."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from freshet.cli.options import PATH, examples, json_option
from freshet.terminal import emit


def _print_json_schema(context: click.Context, _option: click.Parameter, given: bool) -> None:
    if given and not context.resilient_parsing:
        from freshet.config.spec.json_schema import schema_text

        click.echo(schema_text(), nl=False)
        context.exit()


@click.command(
    epilog=examples(
        "freshet check freshet.toml",
        "freshet check freshet.toml --against freshet-run/state/spec.toml",
        "freshet check --json-schema > freshet.schema.json",
    )
)
@click.argument("spec_file", type=PATH)
@click.option(
    "--against",
    type=PATH,
    help="Spec of a running model (state/spec.toml of its folder): list the edits to it.",
)
@click.option(
    "--json-schema",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_json_schema,
    help="Print the JSON Schema of specs, for editors, and exit.",
)
@json_option
def command(spec_file: Path, against: Path | None, as_json: bool) -> None:
    """Check SPEC_FILE against its schemas and explain it.

    A model of your own is built and tried on random samples. With --against the exit status is 3 if an edit
    needs a new model.
    """
    from freshet.apps.recorded_spec import KEPT, load_kept
    from freshet.apps.row_memory import rows_memory_by_table
    from freshet.config.settings import load_settings
    from freshet.config.spec import load_spec
    from freshet.config.spec.explanation import explain
    from freshet.config.spec.identity import diff, identity_hash
    from freshet.config.spec.schemas import load_schemas

    spec = load_spec(spec_file)
    schemas = load_schemas(spec, str(spec_file))
    if against is None:
        report = explain(spec, schemas, str(spec_file))
        if ":" in spec.model.kind:
            from freshet.model.trial import try_out

            try_out(spec, str(spec_file))
        memory = rows_memory_by_table(spec, load_settings())
        value = {
            **asdict(report),
            "identity": identity_hash(spec, schemas),
            "rows_memory": asdict(memory),
        }
        bound = memory.text() if spec.tables else "no table, so there are no rows"
        emit(value, as_json=as_json, text=f"{report.text()}memory: {bound}\n")
        return
    old = load_kept(against) if (against.parent.name, against.name) == KEPT else load_spec(against)
    changes = diff(old, spec, load_schemas(old, str(against)), schemas)
    text = "\n".join(str(change) for change in changes) or "no edit changes the model"
    plain = [{**asdict(c), "old": str(c.old), "new": str(c.new)} for c in changes]
    emit({"changes": plain}, as_json=as_json, text=text)
    if any(change.kind == "identity" for change in changes):
        sys.exit(3)
