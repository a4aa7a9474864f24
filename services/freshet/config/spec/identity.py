"""Identity of a model: the keys of a spec that define it, and the edits that need a new model.

Row stores, versions and the ranks of a quorum are tied to `identity_hash`. Its rules:

- Only `identity` keys with a value other than the default count. So a later release can add an identity key,
  with the former behaviour as its default, and old models keep their hash. If a default changes,
  `NEWEST_DEFAULTS` rises, and a spec with `defaults = 1` keeps its hash.
- The order of labels, tables and features counts, as samples and the row store hold their numbers.
- The path of a schema file does not count. The kinds of the fields that the spec uses do: integer, fraction,
  truth or text, and whether it is a list. Other fields may be added or removed, an int may become a long, and
  a field may become nullable. Units of times, scales of decimals and 16-byte UUIDs are not hashed, as
  hashes of existing models have none; `diff` compares them.

`render` writes a spec as TOML: only values other than defaults, in one canonical order, with the generation
of defaults, so that a later release reads the same spec, and `parse_spec(render(spec)) == spec`. Versions
hold this text, so that a model can be loaded without its folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any

from freshet.config.options import MISSING, Duration, Kind, default_of, duration_text, key_of, options_of
from freshet.config.spec.defaults import default_crosses, default_sharing, features_in, has_default_crosses
from freshet.config.spec.inputs import Step
from freshet.config.spec.layout import (
    CROSSES,
    DEFAULT_ROW_OPTIMIZER,
    DEFAULT_SCALAR_OPTIMIZER,
    OPTIMIZERS,
    default_optimizer,
    has_default_scalars,
)
from freshet.config.spec.model import NEWEST_DEFAULTS, Label, Optimizer, Spec, Table, TimeField
from freshet.config.spec.parse import with_defaults
from freshet.config.spec.schemas import Schemas, field_kinds, reading_of, streams_of
from freshet.errors import ConfigError

EFFECTS: Mapping[str, str] = {
    "identity": "needs a new model: another name, or a new store and a replay of the events",
    "tunable": "the model keeps its rows and weights; applies when its services restart",
    "deployment": "changes where or how it runs, not the model; applies when its services restart",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two specs; `old` or `new` is MISSING if the key was added or removed."""

    key: str  # as in freshet.toml: `tables.user.dim`
    kind: Kind
    old: Any
    new: Any
    effect: str

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)} ({self.kind}): {self.effect}"


class SpecHash(str):
    """Identity hash of a spec, 64 hexadecimal digits.

    It holds the hashes in other generations of defaults, for errors.
    """

    __slots__ = ("generation", "others")
    generation: int
    others: Mapping[str, int]  # hash of the same spec in another generation -> that generation

    @staticmethod
    def of(digits: str, generation: int, others: Mapping[str, int]) -> SpecHash:
        """Create a hash from its digits, its generation and the hashes in other generations."""
        spec_hash = SpecHash(digits)
        spec_hash.generation, spec_hash.others = generation, others
        return spec_hash


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: Kind
    value: Any  # JSON
    default: bool  # the value is the default


def identity_hash(spec: Spec, schemas: Schemas | None = None) -> SpecHash:
    """Compute the hash that row stores, versions and the ranks of a quorum are tied to.

    With `schemas` it covers the kinds of the fields that the spec uses too, so that a start fails if an id
    changed from number to text and would get other rows. All processes of a model must hash alike: with
    schemas, or without as a backtest of files that have none.
    """
    others = {}
    for generation in range(1, NEWEST_DEFAULTS + 1):
        if generation != spec.defaults:
            try:
                others[_digits(with_defaults(spec, generation), schemas)] = generation
            except ConfigError:
                continue  # that generation does not allow this spec, so no model of it exists
    return SpecHash.of(_digits(spec, schemas), spec.defaults, others)


def explain_defaults(own: str, found: str) -> str:
    """Explain in an error that `found` is the hash of this spec in another generation of defaults.

    Returns "" if it is not, or if `own` is a plain string.
    """
    generation = own.others.get(found) if isinstance(own, SpecHash) else None
    if generation is None or not isinstance(own, SpecHash):
        return ""
    return (
        f"  The hash found is the hash of this spec with `defaults = {generation}`; the spec now has "
        f"`defaults = {own.generation}`.\n"
        f"  To continue with that model unchanged, put `defaults = {generation}` at the top of the spec.\n"
        f"  To start a new model with `defaults = {own.generation}`, use another name, or a new store."
    )


def _digits(spec: Spec, schemas: Schemas | None) -> str:
    entries = {
        k: e.value
        for k, e in _entries(spec).items()
        if e.kind == "identity" and not e.default and k != "defaults"
    }
    if schemas is not None:
        entries["fields"] = field_kinds(spec, schemas)
    canonical = json.dumps(
        {"defaults": spec.defaults, "spec": entries}, sort_keys=True, separators=(",", ":"), ensure_ascii=True
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def diff(
    old: Spec, new: Spec, old_schemas: Schemas | None = None, new_schemas: Schemas | None = None
) -> list[Change]:
    """Return the differences of two specs, identity first; an identity change needs a new model."""
    before, after = _entries(old), _entries(new)
    if old_schemas is not None and new_schemas is not None:
        for entries, spec, schemas in ((before, old, old_schemas), (after, new, new_schemas)):
            for path, kind in field_kinds(spec, schemas, reading_of).items():
                entries[f"field {path}"] = _Entry("identity", kind, default=False)
    changes = [
        _change(key, before.get(key), after.get(key))
        for key in [*before, *(k for k in after if k not in before)]
        if before.get(key) != after.get(key) and not _is_addition(before.get(key), after.get(key), key)
    ]
    order = ("identity", "tunable", "deployment")
    return sorted(_merge_sections(changes, before.keys(), after.keys()), key=lambda c: order.index(c.kind))


def _is_addition(old: _Entry | None, new: _Entry | None, key: str) -> bool:
    """Return whether an order differs because of additions or removals, which are changes of their own."""
    return (
        key.endswith("(order)") and old is not None and new is not None and set(old.value) != set(new.value)
    )


def _change(key: str, old: _Entry | None, new: _Entry | None) -> Change:
    entry = old or new
    assert entry is not None
    return Change(
        key, entry.kind, old.value if old else MISSING, new.value if new else MISSING, EFFECTS[entry.kind]
    )


def _merge_sections(changes: list[Change], before: Set[str], after: Set[str]) -> Iterator[Change]:
    """Merge the changes of all keys of an added or removed label, table, feature or stream into one.

    `before` and `after` are all keys of the two specs: only a section that one of them lacks is merged.
    """
    one_sided = {_section_of(key) for key in before} ^ {_section_of(key) for key in after}
    seen: dict[str, Change] = {}
    for change in changes:
        whole, added = _section_of(change.key), change.old is MISSING
        if not whole or whole not in one_sided:
            yield change
            continue
        earlier = seen.get(whole)
        values = {
            **((earlier.new if added else earlier.old) if earlier else {}),
            change.key.removeprefix(f"{whole}."): change.new if added else change.old,
        }
        seen[whole] = Change(
            whole, "identity", MISSING if added else values, values if added else MISSING, EFFECTS["identity"]
        )
    yield from seen.values()


def _section_of(key: str) -> str:
    """Return `tables.item` for `tables.item.dim`; "" for a key outside labels, tables, features, events."""
    section, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    return f"{section}.{name}" if section in ("labels", "tables", "features", "events") else ""


def _entries(spec: Spec) -> dict[str, _Entry]:
    """Return all keys of the spec, by path in the file, with kind and value."""
    found: dict[str, _Entry] = dict(_of(spec, "", spec.defaults))
    for stream in streams_of(spec):
        found.update(_of(stream, f"events.{stream.role}.", spec.defaults))
    found.update(_of(spec.join, "join.", spec.defaults))
    for crosses in (t for t in spec.tables if t.name == CROSSES):
        found.update(_of_crosses(crosses, spec.defaults))
    tables = [t for t in spec.tables if t.name != CROSSES]
    features = [f for f in spec.features if f.kind != "cross"]
    for section, things in (("labels", spec.labels), ("tables", tables), ("features", features)):
        found[f"{section} (order)"] = _Entry("identity", [t.name for t in things], default=False)
        for thing in things:
            found.update(_of(thing, f"{section}.{thing.name}.", spec.defaults))
    for table in tables:
        usual = default_sharing(features_in(spec.features, table.name), spec.defaults)
        key = f"tables.{table.name}.shared"
        found[key] = _Entry("identity", table.shared, default=table.shared == usual)
    for name in ("model", "train", "serve", "retention", "files"):
        found.update(_of(getattr(spec, name), f"{name}.", spec.defaults))
    found.update(_of(spec.serve.explore, "serve.explore.", spec.defaults))
    found.update(_of(spec.serve.gate, "serve.gate.", spec.defaults))
    return found


def _of_crosses(table: Table, generation: int) -> Iterator[tuple[str, _Entry]]:
    """Yield the tunable keys of the implicit table of crosses, and its optimiser if it is not the default."""
    prefix = f"tables.{table.name}."
    for key, entry in _of(table, prefix, generation):
        if entry.kind != "identity":
            yield key, entry
    if not has_default_scalars(table):
        yield from _optimizer(table.scalar_optimizer, "identity", f"{prefix}scalar_optimizer")


def _of(obj: Any, prefix: str, generation: int) -> Iterator[tuple[str, _Entry]]:
    for f in fields(obj):
        if "kind" not in f.metadata:
            continue
        value = getattr(obj, f.name)
        key = prefix + key_of(f)
        if isinstance(value, Optimizer):
            yield from _optimizer(value, f.metadata["kind"], key)
        elif not is_dataclass(value) or isinstance(value, TimeField):
            yield (
                key,
                _Entry(
                    f.metadata["kind"], _written(f, value), default=bool(value == default_of(f, generation))
                ),
            )


def _optimizer(optimizer: Optimizer, kind: Kind, key: str) -> Iterator[tuple[str, _Entry]]:
    yield f"{key}.name", _Entry(kind, optimizer.name, default=False)
    for parameter in OPTIMIZERS[optimizer.name].parameters:
        value = optimizer.parameters[parameter.name]
        yield f"{key}.{parameter.name}", _Entry(kind, value, default=value == parameter.default)


def _written(option: Field[Any], value: Any) -> Any:
    """Return the value of an option as in the spec, as JSON or TOML."""
    if isinstance(value, TimeField):
        return f"{value.path}:{value.unit}"
    if isinstance(option.metadata["form"], Duration):
        return False if value is None else duration_text(value)
    if isinstance(value, tuple):
        return [_item(v) for v in value]
    return dict(value) if isinstance(value, Mapping) else value


def _item(value: Any) -> Any:
    if isinstance(value, Step):
        return value.as_written()
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return "nothing" if value is MISSING else json.dumps(value, ensure_ascii=False)


def render(spec: Spec) -> str:
    """Return the spec as TOML."""
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
    """Yield keys and TOML values of the options that differ from their defaults in a generation."""
    for option in options_of(type(obj)):
        value = getattr(obj, option.name)
        default = default_of(option, generation)
        if default is NO_DEFAULT or value != default:
            yield key_of(option), _written(option, value)


def _label(label: Label, generation: int) -> dict[str, Any]:
    return {**dict(_options(label, generation)), "loss": label.loss}


def _tables(spec: Spec) -> Iterator[str]:
    for table in spec.tables:
        values = _table(spec, table)
        if table.name == CROSSES:  # implicit, without vectors
            del values["dim"]
        if values:
            yield _inline(table.name, values)


def _table(spec: Spec, table: Table) -> dict[str, Any]:
    found = {**dict(_options(table, spec.defaults)), "dim": table.dim}
    if table.shared == default_sharing(features_in(spec.features, table.name), spec.defaults):
        del found["shared"]
    for key, default in (
        ("optimizer", DEFAULT_ROW_OPTIMIZER),
        ("scalar_optimizer", DEFAULT_SCALAR_OPTIMIZER),
    ):
        optimizer: Optimizer = getattr(table, key)
        if optimizer != default_optimizer(default):
            found[key] = {"name": optimizer.name, **optimizer.parameters}
    return found


def _model(spec: Spec) -> Iterator[str]:
    model = spec.model
    values = dict(_options(model, spec.defaults))
    if model.kind != "hedge":
        values = {key: value for key, value in values.items() if key not in ("experts", "crosses")}
    elif default_crosses(spec.features, spec.defaults):
        if has_default_crosses(spec):
            del values["experts"], values["crosses"]
        elif "experts" not in values:
            values.setdefault("crosses", [])
    for key, value in values.items():
        yield f"{key} = {toml_value(value)}"
    if model.options:
        yield f"options = {toml_value(model.options)}"


def _inline(name: str, values: Mapping[str, Any]) -> str:
    return f"{name} = {toml_value(values)}"


def toml_value(value: Any) -> str:
    """Format a value as TOML. Raises TypeError for a type that TOML lacks."""
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
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)  # bare, a dot would nest it
