"""Random schemas with records that fit them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from freshet.config.avro.schema import Record, parse_schema

LONG = st.integers(-(2**63), 2**63 - 1)
LEAVES: dict[str, st.SearchStrategy[Any]] = {
    "null": st.none(),
    "boolean": st.booleans(),
    "int": st.integers(-(2**31), 2**31 - 1),
    "long": LONG,
    "float": st.floats(width=32),
    "double": st.floats(),
    "bytes": st.binary(max_size=12),
    "string": st.text(max_size=12),
}
Drawn = tuple[Any, st.SearchStrategy[Any]]
"""A schema's JSON, and a strategy for its values as fastavro takes them."""


@st.composite
def types(draw: st.DrawFn, depth: int, names: list[int]) -> Drawn:  # noqa: PLR0911 - one for each kind
    kinds = ["leaf"] * 4 + ["enum", "fixed"]
    if depth:
        kinds += ["array", "map", "record", "union"]
    match draw(st.sampled_from(kinds)):
        case "enum":
            names.append(0)
            symbols = [f"S{i}" for i in range(draw(st.integers(1, 4)))]
            return {"type": "enum", "name": f"E{len(names)}", "symbols": symbols}, st.sampled_from(symbols)
        case "fixed":
            names.append(0)
            n = draw(st.integers(0, 5))
            return {"type": "fixed", "name": f"F{len(names)}", "size": n}, st.binary(min_size=n, max_size=n)
        case "array":
            items, value = draw(types(depth - 1, names))
            return {"type": "array", "items": items}, st.lists(value, max_size=3)
        case "map":
            values, value = draw(types(depth - 1, names))
            return {"type": "map", "values": values}, st.dictionaries(st.text(max_size=4), value, max_size=3)
        case "record":
            return draw(records(depth - 1, names))
        case "union":
            return draw(unions(depth - 1, names))
        case _:
            name = draw(st.sampled_from(sorted(LEAVES)))
            return name, LEAVES[name]


@st.composite
def unions(draw: st.DrawFn, depth: int, names: list[int]) -> Drawn:
    """A union of null and up to two others."""
    branches: dict[str, Drawn] = {"null": ("null", st.none())}
    for _ in range(draw(st.integers(0, 2))):
        made, value = draw(types(depth, names))
        if not isinstance(made, list):
            kind = made if isinstance(made, str) else made.get("name", made["type"])
            branches[kind] = (made, value)
    order = draw(st.permutations(sorted(branches)))
    return [branches[k][0] for k in order], st.one_of([branches[k][1] for k in order])


@st.composite
def records(draw: st.DrawFn, depth: int, names: list[int]) -> Drawn:
    names.append(0)
    name = f"R{len(names)}"
    made = [draw(types(depth, names)) for _ in range(draw(st.integers(0, 4)))]
    fields = [{"name": f"f{i}", "type": t} for i, (t, _) in enumerate(made)]
    values = {f"f{i}": v for i, (_, v) in enumerate(made)}
    return {"type": "record", "name": name, "fields": fields}, st.fixed_dictionaries(values)


@st.composite
def schemas_with_records(draw: st.DrawFn) -> tuple[Record, list[Any]]:
    """A schema, and up to four records of it."""
    tree, values = draw(records(3, []))
    return parse_schema(tree), draw(st.lists(values, max_size=4))
