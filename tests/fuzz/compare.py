"""One random schema: its records and their mutants, read by freshet and by fastavro."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import fastavro
import numpy as np

from freshet.config.avro.schema import parse_schema
from freshet.config.spec.layout import Layout, layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import parse_spec
from freshet.features import AvroValidator, SampleDecoder
from freshet.types import BytesColumn
from tests.fixtures import feature_oracle as oracle
from tests.fuzz.judge import Judge, Refused
from tests.fuzz.schemas import MAP_KEY, SchemaMaker, Writer, mutated

NUMBERS = {"boolean", "int", "long", "float", "double"}
MAX_FEATURES = 8
SPEC = """
name = "fuzz"
[events]
served = { topic = "s", schema = "s.avsc", key = ["f0"], time = "f0:ms" }
action = { topic = "a", schema = "a.avsc", key = ["f0"], time = "f0:ms" }
[labels]
click = { on = "action.type == 'click'", window = "2m" }
[tables]
t = { dim = 4 }
[features]
hour = { time = "hour", table = "t" }
"""


class Disagreement(AssertionError):
    """freshet and its references say different things of a record."""

    def __init__(self, schema: Any, record: bytes, ours: object, theirs: object) -> None:
        super().__init__(
            f"freshet: {ours}\nexpected: {theirs}\nrecord: {record.hex()}\nschema: {json.dumps(schema)}"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is expected of freshet's decoder for a record."""

    rule: str | None  # why it is refused
    value: Any = None  # as fastavro reads it
    comparable: bool = False  # fastavro's value is what freshet must see, too


class AmbiguousError(Exception):
    """An integer of a union with int and long, one of them read as a float: the value does not show which."""


def resolved(type_: Any, value: Any) -> Any:
    """fastavro's value as freshet resolves it: a value of a union is of the first branch that takes it, so an
    earlier float or double takes integers. fastavro leaves a value in its branch if writer and reader have
    the same schema."""
    if isinstance(type_, list):
        if isinstance(value, int) and not isinstance(value, bool):
            return integer_of_union(type_, value)
        containers = [b for b in type_ if isinstance(b, dict) and b["type"] in ("record", "array", "map")]
        return resolved(containers[0], value) if len(containers) == 1 and value is not None else value
    if isinstance(value, list):
        return [resolved(type_["items"], one) for one in value]
    if not isinstance(value, dict):
        return value
    if type_["type"] == "record":
        return {f["name"]: resolved(f["type"], value[f["name"]]) for f in type_["fields"]}
    return {key: resolved(type_["values"], one) for key, one in value.items()}


def integer_of_union(branches: Sequence[Any], value: int) -> int | float:
    """An integer of a union, as its first branch that takes it. Raises AmbiguousError."""
    written = [b for b in ("int", "long") if b in branches and (b == "long" or -(2**31) <= value < 2**31)]
    taking = {"int": ("int", "long", "float", "double"), "long": ("long", "float", "double")}
    read = {next(b for b in branches if b in taking[one]) for one in written}
    if len(read) > 1 and read != {"int", "long"}:
        raise AmbiguousError
    match read.pop():
        case "float":
            return float(np.float32(value))
        case "double":
            return float(value)
        case _:
            return value


def leaves(type_: Any, path: str, *, many: bool) -> Iterator[tuple[str, bool, bool]]:
    """Paths that a feature can name: (path, whether it has many values, whether they are numbers)."""
    branches = [b for b in (type_ if isinstance(type_, list) else [type_]) if b != "null"]
    if branches and all(isinstance(b, str) or b["type"] in ("enum", "fixed") for b in branches):
        yield path, many, all(isinstance(b, str) and b in NUMBERS for b in branches)
    elif len(branches) == 1:
        inner = branches[0]
        match inner["type"]:
            case "record":
                for f in inner["fields"]:
                    yield from leaves(f["type"], f"{path}.{f['name']}" if path else f["name"], many=many)
            case "array" if isinstance(type_, list):
                pass  # a feature takes no list that may be null
            case "array":
                yield from leaves(inner["items"], path, many=True)
            case _ if not many:
                yield from leaves(inner["values"], f"{path}.{MAP_KEY}", many=False)


def spec_of(schema: Any, random: Random) -> tuple[Spec, list[str]]:
    """A spec with features at some of the schema's leaves; the paths that it reads."""
    found = list(leaves(schema, "", many=False))
    chosen = random.sample(found, min(len(found), random.randint(1, MAX_FEATURES)))
    lines = []
    for i, (path, many, numbers) in enumerate(chosen):
        if many:
            lines.append(f'x{i} = {{ field = "{path}", table = "t", max = 4, pool = "sum" }}')
        elif numbers and random.random() < 0.5:
            lines.append(f'x{i} = {{ field = "{path}", dense = "raw" }}')
        else:
            lines.append(f'x{i} = {{ field = "{path}", table = "t" }}')
    return parse_spec(SPEC + "\n".join(lines)), [path for path, _, _ in chosen]


class Reference:
    """What must be said of records of a schema, by the judge and fastavro."""

    def __init__(self, schema: Any, paths: Sequence[str]) -> None:
        self.schema = schema
        self.parsed = fastavro.parse_schema(json.loads(json.dumps(schema)))
        above = {".".join(p.split(".")[: i + 1]) for p in paths for i in range(p.count(".") + 1)}
        self.decoder = Judge(schema, wanted=lambda path: path in above, strict=False)
        self.to_the_last_byte = Judge(schema, wanted=lambda _: True, strict=False)
        self.strict = Judge(schema, wanted=lambda _: True, strict=True)

    def decoded(self, record: bytes) -> Verdict:
        """What the decoder must do."""
        try:
            comparable = self.decoder.check(record)
        except Refused as refused:
            if not self.decoder.ambiguous:  # after a block that was skipped fastavro may stand elsewhere
                self.share(refused, record, "surrogateescape")
            return Verdict(refused.rule)
        if not comparable:
            try:
                comparable = self.to_the_last_byte.check(record)
            except Refused:  # in a block that the decoder skips
                return Verdict(None)
        try:
            return Verdict(None, resolved(self.schema, self.read(record, "surrogateescape")), comparable)
        except AmbiguousError:
            return Verdict(None)

    def validated(self, record: bytes) -> str | None:
        """Why the check at the way in must refuse; None if it must not."""
        try:
            self.strict.check(record)
        except Refused as refused:
            self.share(refused, record, "strict")
            return refused.rule
        self.read(record, "strict")
        return None

    def share(self, refused: Refused, record: bytes, unicode_errors: str) -> None:
        """Demand of fastavro that it refuses a record, too, where the rule is none of freshet's own."""
        if not refused.shared:
            return
        try:
            value = self.read(record, unicode_errors)
        except Disagreement:
            return
        raise Disagreement(self.schema, record, refused.rule, f"fastavro reads it: {value!r}")

    def read(self, record: bytes, unicode_errors: str) -> Any:
        """A good record's value."""
        stream = io.BytesIO(record)
        try:
            value = fastavro.schemaless_reader(
                stream, self.parsed, None, handle_unicode_errors=unicode_errors
            )
        except Exception as e:  # whatever fastavro meets in hostile bytes: many types, none promised
            raise Disagreement(self.schema, record, "is read", f"fastavro refuses it: {e!r}") from e
        if stream.read(1):
            raise Disagreement(self.schema, record, "is read", "fastavro leaves bytes")
        return value


def compare_schema(seed: str, records: int) -> Counter[str]:
    """Make a schema and `records` of it, most of them mutated, and compare.

    Returns:
        How many were read, and refused by which rule.

    Raises:
        Disagreement: with all that is needed to see it again.
    """
    random = Random(seed)
    schema = SchemaMaker(random).record()
    spec, paths = spec_of(schema, random)
    writer, reference = Writer(random), Reference(schema, paths)
    made = []
    for _ in range(records):
        record = writer.write(schema)
        made.append(record if random.random() < 0.4 else mutated(record, random))
    parsed, column = parse_schema(schema), BytesColumn.of(made)
    verdicts = [reference.decoded(record) for record in made]
    _compare_validator(AvroValidator(parsed), reference, made)
    decoder = SampleDecoder(spec, layout_of(spec), lambda _: parsed)
    counts = Counter(
        f"refused: {v.rule}" if v.rule else "read" if v.comparable else "read, by size" for v in verdicts
    )
    # All in one batch, and each where no byte follows it: a record's neighbours must not matter.
    _compare_decoded(spec, layout_of(spec), decoder, reference, made, verdicts)
    for i in random.sample(range(records), min(records, 10)):
        _compare_decoded(spec, layout_of(spec), decoder, reference, [made[i]], [verdicts[i]])
    assert len(column) == records
    return counts


def _compare_validator(validator: AvroValidator, reference: Reference, made: Sequence[bytes]) -> None:
    refused = {r.index: r.found for r in validator.refused(BytesColumn.of(made), framed=False)}
    for i, record in enumerate(made):
        rule, reason = reference.validated(record), refused.get(i)
        if (rule is None) != (reason is None) or (rule is not None and rule not in str(reason)):
            raise Disagreement(reference.schema, record, f"checked: {reason}", rule)


def _compare_decoded(
    spec: Spec,
    layout: Layout,
    decoder: SampleDecoder,
    reference: Reference,
    made: Sequence[bytes],
    verdicts: Sequence[Verdict],
) -> None:
    got = decoder.decode(BytesColumn.of(list(made)), 1, np.zeros(len(made), np.int64))
    reasons = dict(zip(got.bad.tolist(), got.why, strict=True))
    for i, verdict in enumerate(verdicts):
        reason = reasons.get(i)
        if (verdict.rule is None) != (reason is None) or (
            verdict.rule is not None and verdict.rule not in str(reason)
        ):
            raise Disagreement(reference.schema, made[i], f"decoded: {reason}", verdict.rule)
    good = [i for i, v in enumerate(verdicts) if v.rule is None]
    rows = [row for row, i in enumerate(good) if verdicts[i].comparable]
    samples = [verdicts[good[row]].value for row in rows]
    ours = oracle.decoded_keys(got)
    theirs = oracle.group_keys(spec, layout, samples, [0] * len(samples))
    wanted = [spec.features[f] for f in layout.dense]
    for k, row in enumerate(rows):
        keys = [[feature[row] for feature in group] for group in ours]
        expected = [[feature[k] for feature in group] for group in theirs]
        if keys != expected:
            raise Disagreement(reference.schema, made[good[row]], keys, expected)
        with np.errstate(over="ignore"):
            dense = np.array([oracle.dense_value(f, samples[k], serving=False) for f in wanted], np.float32)
        if not np.array_equal(got.dense[row], dense, equal_nan=True):
            raise Disagreement(reference.schema, made[good[row]], got.dense[row], dense)
