"""A `Spec` back to the text of a `freshet.toml`: only what differs from the defaults, in one canonical order.

The text always says which generation of defaults it means, so that a later release reads the same spec.
`parse_spec(render(spec)) == spec`. Versions carry this text, so that a model can be read without its folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field
from typing import Any

from freshet.config.options import Duration, default_of, duration_text, key_of, options_of
from freshet.config.spec.experts import default_crosses, has_default_crosses
from freshet.config.spec.forms import Step
from freshet.config.spec.layout import default_sharing, features_in
from freshet.config.spec.model import Label, Optimizer, Spec, Table, TimeField
from freshet.config.spec.optimizers import complete
from freshet.config.spec.parse_inputs import CROSSES, DEFAULT_ROW_OPTIMIZER, DEFAULT_SCALAR_OPTIMIZER

__all__ = ["render", "toml_value"]


def render(spec: Spec) -> str:
    """The spec as TOML."""
    generation = spec.defaults
    lines = [f"{key} = {toml_value(value)}" for key, value in _options(spec, generation) if key != "defaults"]
    lines.insert(1, f"defaults = {generation}")
    lines += ["", "[events]"]
    for stream in (spec.events.served, spec.events.shown, spec.events.action):
        if stream is not None:
            lines.append(_inline(stream.role, dict(_options(stream, generation))))
    lines += _section("join", _keys(spec.join, generation))
    lines += _section("labels", (_inline(label.name, _label(label, generation)) for label in spec.labels))
    lines += _section("tables", _tables(spec))
    features = [f for f in spec.features if f.kind != "cross"]
    lines += _section("features", (_inline(f.name, dict(_options(f, generation))) for f in features))
    lines += _section("model", _model(spec))
    lines += _section("train", _keys(spec.train, generation))
    serve = [*_keys(spec.serve, generation)]
    serve += [
        _inline(n, dict(_options(o, generation)))
        for n, o in (("explore", spec.serve.explore), ("gate", spec.serve.gate))
    ]
    lines += _section("serve", (line for line in serve if not line.endswith("= {}")))
    lines += _section("retention", _keys(spec.retention, generation))
    lines += _section("files", _keys(spec.files, generation))
    return "\n".join(lines) + "\n"


def _section(name: str, lines: Iterator[str]) -> list[str]:
    found = list(lines)
    return ["", f"[{name}]", *found] if found else []


def _keys(obj: Any, generation: int) -> Iterator[str]:
    for key, value in _options(obj, generation):
        yield f"{key} = {toml_value(value)}"


def _options(obj: Any, generation: int) -> Iterator[tuple[str, Any]]:
    """Keys and TOML values of the options that differ from their defaults in a generation."""
    for option in options_of(type(obj)):
        value = getattr(obj, option.name)
        default = default_of(option, generation)
        if default is NO_DEFAULT or value != default:
            yield key_of(option), _as_written(option, value)


def _as_written(option: Field[Any], value: Any) -> Any:
    if isinstance(value, TimeField):
        return f"{value.path}:{value.unit}"
    if isinstance(option.metadata["form"], Duration):
        return False if value is None else duration_text(value)
    if isinstance(value, tuple):
        return [v.as_written() if isinstance(v, Step) else v for v in value]
    return value


def _label(label: Label, generation: int) -> dict[str, Any]:
    return {**dict(_options(label, generation)), "loss": label.loss}


def _tables(spec: Spec) -> Iterator[str]:
    for table in spec.tables:
        said = _table(spec, table)
        if table.name == CROSSES:  # it is there without a word, and has no vectors
            del said["dim"]
        if said:
            yield _inline(table.name, said)


def _table(spec: Spec, table: Table) -> dict[str, Any]:
    found = {**dict(_options(table, spec.defaults)), "dim": table.dim}
    if table.shared == default_sharing(features_in(spec.features, table.name), spec.defaults):
        del found["shared"]
    for key, default in (
        ("optimizer", DEFAULT_ROW_OPTIMIZER),
        ("scalar_optimizer", DEFAULT_SCALAR_OPTIMIZER),
    ):
        optimizer: Optimizer = getattr(table, key)
        if optimizer != Optimizer(name=default, parameters=complete(default)):
            found[key] = {"name": optimizer.name, **optimizer.parameters}
    return found


def _model(spec: Spec) -> Iterator[str]:
    model = spec.model
    said = dict(_options(model, spec.defaults))
    if model.kind != "hedge":
        said = {key: value for key, value in said.items() if key not in ("experts", "crosses")}
    elif default_crosses(spec.features, spec.defaults):
        if has_default_crosses(spec):
            del said["experts"], said["crosses"]
        elif "experts" not in said:
            said.setdefault("crosses", [])
    for key, value in said.items():
        yield f"{key} = {toml_value(value)}"
    if model.options:
        yield f"options = {toml_value(model.options)}"


def _inline(name: str, values: Mapping[str, Any]) -> str:
    return f"{name} = {toml_value(values)}"


def toml_value(value: Any) -> str:
    """A value as TOML spells it. Raises TypeError for what TOML has not."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value).replace("e+", "e") if value != int(value) or abs(value) >= 1e15 else f"{value:.1f}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(v) for v in value)}]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    raise TypeError(f"TOML has no {type(value).__name__}: {value!r}")


def _key(key: str) -> str:
    bare = all(
        part and part.replace("_", "a").replace("-", "a").isalnum() and part.isascii()
        for part in key.split(".")
    )
    return key if bare else json.dumps(key)
