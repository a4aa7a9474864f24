"""Avro schemas as frozen objects: parser, fields by path, derived schemas and canonical text.

`freshet.features` decodes records. The objects hold no docs and no sort orders. A record inside its own
definition is a `Recursion`; paths cannot lead through it.
"""

from freshet.config.avro.parse import MAX_DEPTH, parse_schema, parse_written
from freshet.config.avro.paths import (
    SERVED_FIELD,
    Located,
    field_at,
    paths,
    sample_schema,
    served_schema,
)
from freshet.config.avro.types import (
    Array,
    AvroField,
    Enum,
    Fixed,
    Map,
    Primitive,
    Record,
    Recursion,
    Type,
    Union,
    Written,
    canonical,
    is_null,
    spell,
    to_json,
    without_defaults,
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
    "Recursion",
    "Type",
    "Union",
    "Written",
    "canonical",
    "field_at",
    "is_null",
    "parse_schema",
    "parse_written",
    "paths",
    "sample_schema",
    "served_schema",
    "spell",
    "to_json",
    "without_defaults",
]
