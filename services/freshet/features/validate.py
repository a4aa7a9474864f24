"""The check of Avro that others encoded, before it is acknowledged."""

from __future__ import annotations

from freshet import _native
from freshet.config.avro.schema import Record
from freshet.features.program import compile_program
from freshet.features.transcode import RefusedEvent
from freshet.types import BytesColumn

__all__ = ["AvroValidator"]


class AvroValidator:
    """Checks records of one schema to their last byte: bounds, branches, symbols, UTF-8. Thread-safe."""

    def __init__(self, schema: Record) -> None:
        self._program = compile_program(schema, [])

    def refused(self, values: BytesColumn, *, framed: bool) -> list[RefusedEvent]:
        """The records that are not of this schema, rising; `framed`: each starts with a Confluent frame."""
        failures = _native.validate_avro(self._program.native, values.data, values.ends, framed)
        return [
            RefusedEvent(
                index,
                self._program.places[node][0],
                self._program.places[node][1],
                self._program.explain(why, 0, offset),
            )
            for index, _, why, node, offset in failures.tolist()
        ]
