"""Avro schemas as frozen objects: parsed once, checked, found by path, written back in one canonical form.

Pure: no bytes of records are read here (that is `freshet.features`). Refused, though Avro has them: recursive
types (a feature path into them has no fixed meaning). Aliases, docs and sort orders are
dropped: readers resolve fields by name.
"""

from freshet.spec.avro_parse import MAX_DEPTH, parse_schema
from freshet.spec.avro_paths import SERVED_FIELD, Located, field_at, paths, sample_schema, served_schema
from freshet.spec.avro_types import (
    Array,
    AvroField,
    Enum,
    Fixed,
    Map,
    Primitive,
    Record,
    Type,
    Union,
    canonical,
    is_null,
    spell,
    to_json,
)

__all__ = [
    "MAX_DEPTH",
    "SERVED_FIELD",
    "Array",
    "AvroField",
    "Enum",
    "Fixed",
    "Located",
    "Map",
    "Primitive",
    "Record",
    "Type",
    "Union",
    "canonical",
    "field_at",
    "is_null",
    "parse_schema",
    "paths",
    "sample_schema",
    "served_schema",
    "spell",
    "to_json",
]
