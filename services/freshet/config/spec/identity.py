"""Which keys of a spec make it the model that it is, and which edits to a running model need a new one.

A row store, a version and a trainer's seat are tied to `identity_hash`. Three rules:

- Only `identity` keys count, and only where they differ from the default. So a later release can add an
  identity key whose default is what was done before, and old models keep their hash. A changed default is a
  changed meaning: then `NEWEST_DEFAULTS` rises, and a spec that says `defaults = 1` keeps its hash.
- Order counts for labels, tables and features: their numbers stand in samples and in the store.
- The path of a schema file does not count. What a schema says of the fields that the spec uses does, as far
  as it makes keys and numbers: whether a field holds integers, fractions, truths or text, and whether it is a
  list. Other fields may come and go, an int may become a long, a field may become nullable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any

from freshet.config.options import MISSING, Duration, Kind, default_of, duration_text, key_of
from freshet.config.spec.forms import Step
from freshet.config.spec.layout import default_sharing, features_in
from freshet.config.spec.model import NEWEST_DEFAULTS, Optimizer, Spec, Table, TimeField
from freshet.config.spec.optimizers import OPTIMIZERS
from freshet.config.spec.parse import with_defaults
from freshet.config.spec.parse_inputs import CROSSES, has_default_scalars
from freshet.config.spec.schema_fit import field_kinds
from freshet.config.spec.schemas import Schemas, streams_of
from freshet.errors import ConfigError

__all__ = ["Change", "SpecHash", "diff", "explain_defaults", "identity_hash"]

EFFECTS: Mapping[str, str] = {
    "identity": "needs a new model: another name, or a new store and a replay of the events",
    "tunable": "the model goes on with its rows and weights; taken up when its services start again",
    "deployment": "changes where or how it runs, not what is learned; taken up when its services start again",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One edit between two specs. `old` or `new` is MISSING where the thing came or went."""

    key: str  # as in freshet.toml: `tables.user.dim`
    kind: Kind
    old: Any
    new: Any
    effect: str

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)} ({self.kind}): {self.effect}"


class SpecHash(str):
    """A spec's identity hash: 64 hexadecimal digits. It knows what the same spec hashes to in other
    generations of defaults, for errors.
    """

    __slots__ = ("generation", "others")
    generation: int  # of the hash itself
    others: Mapping[str, int]  # hash of the same spec in another generation -> that generation

    @staticmethod
    def of(digits: str, generation: int, others: Mapping[str, int]) -> SpecHash:
        """The hash with its surroundings."""
        made = SpecHash(digits)
        made.generation, made.others = generation, others
        return made


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: Kind
    value: Any  # JSON
    default: bool  # the value is the default


def identity_hash(spec: Spec, schemas: Schemas | None = None) -> SpecHash:
    """The hash that stores, versions and seats are tied to: 64 hexadecimal digits.

    With `schemas` it also covers the kinds of the fields that the spec uses, so that a user id that turns
    from a number into text is noticed before it gets other rows. One model is always hashed one way: with
    schemas, or, like a backtest of files that have none, without.
    """
    others = {}
    for generation in range(1, NEWEST_DEFAULTS + 1):
        if generation != spec.defaults:
            try:
                others[_digits(with_defaults(spec, generation), schemas)] = generation
            except ConfigError:
                continue  # the spec uses what that generation does not allow: no model of it can exist
    return SpecHash.of(_digits(spec, schemas), spec.defaults, others)


def explain_defaults(own: str, found: str) -> str:
    """Lines that say what to do where `found` is the hash of the own spec in another generation of defaults.

    Empty where it is not, or where `own` is a plain string. Lines are indented, as those of an error are.
    """
    generation = own.others.get(found) if isinstance(own, SpecHash) else None
    if generation is None or not isinstance(own, SpecHash):
        return ""
    return (
        f"  The hash found is that of this spec with `defaults = {generation}`; the spec now means "
        f"`defaults = {own.generation}`.\n"
        f"  To go on with that model as it was, put `defaults = {generation}` at the top of the spec.\n"
        f"  To begin anew with `defaults = {own.generation}`, give the model another name, or a new store."
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
    """What an edit changes, identity first: if any change is of identity, the edit needs a new model."""
    before, after = _entries(old), _entries(new)
    if old_schemas is not None and new_schemas is not None:
        for entries, spec, schemas in ((before, old, old_schemas), (after, new, new_schemas)):
            for path, kind in field_kinds(spec, schemas).items():
                entries[f"field {path}"] = _Entry("identity", kind, default=False)
    changes = [
        _change(key, before.get(key), after.get(key))
        for key in [*before, *(k for k in after if k not in before)]
        if before.get(key) != after.get(key) and not _only_longer(before.get(key), after.get(key), key)
    ]
    order = ("identity", "tunable", "deployment")
    return sorted(_gathered(changes), key=lambda c: order.index(c.kind))


def _only_longer(old: _Entry | None, new: _Entry | None, key: str) -> bool:
    """Whether an order changed only because something came or went, which is told by itself."""
    return (
        key.endswith("(order)") and old is not None and new is not None and set(old.value) != set(new.value)
    )


def _change(key: str, old: _Entry | None, new: _Entry | None) -> Change:
    entry = old or new
    assert entry is not None
    return Change(
        key, entry.kind, old.value if old else MISSING, new.value if new else MISSING, EFFECTS[entry.kind]
    )


def _gathered(changes: list[Change]) -> Iterator[Change]:
    """A label, table, feature or stream that came or went is one change, not one for each of its keys."""
    seen: dict[str, Change] = {}
    for change in changes:
        section, _, rest = change.key.partition(".")
        name = rest.partition(".")[0]
        came, went = change.old is MISSING, change.new is MISSING
        if section not in ("labels", "tables", "features", "events") or not (came or went):
            yield change
            continue
        whole = f"{section}.{name}"
        was = seen.get(whole)
        values = {
            **((was.new if came else was.old) if was else {}),
            rest.partition(".")[2]: change.new if came else change.old,
        }
        seen[whole] = Change(
            whole, "identity", MISSING if came else values, values if came else MISSING, EFFECTS["identity"]
        )
    yield from seen.values()


def _entries(spec: Spec) -> dict[str, _Entry]:
    """Every key of the spec, by its path in the file, with its kind and value."""
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
    """Of the table that crosses bring: what a spec may say of it, and what it does say of its optimiser."""
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
                _Entry(f.metadata["kind"], _json(f, value), default=bool(value == default_of(f, generation))),
            )


def _optimizer(optimizer: Optimizer, kind: Kind, key: str) -> Iterator[tuple[str, _Entry]]:
    yield f"{key}.name", _Entry(kind, optimizer.name, default=False)
    for parameter in OPTIMIZERS[optimizer.name].parameters:
        value = optimizer.parameters[parameter.name]
        yield f"{key}.{parameter.name}", _Entry(kind, value, default=value == parameter.default)


def _json(f: Field[Any], value: Any) -> Any:
    if isinstance(value, TimeField):
        return f"{value.path}:{value.unit}"
    if isinstance(f.metadata["form"], Duration):
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
