"""Rows of files with columns as Avro events of one stream, with their times. Needs the extra `replay`
(pyarrow)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from freshet.config.avro.schema import Record
from freshet.config.spec.model import Files, TimeField
from freshet.errors import BadInput
from freshet.features.arrow import TableEncoder, find
from freshet.features.cells import Form, Misfit, plain, times
from freshet.recordings.sample_files import refused
from freshet.recordings.tables import TableFile
from freshet.types import I64, BytesColumn

__all__ = ["event_rows"]


def event_rows(
    path: Path, time: TimeField, schema: Record, files: Files
) -> Iterator[tuple[int, I64, BytesColumn, Callable[[int], str]]]:
    """Pieces of a file: (number of the first row from 0, event times in microseconds, Avro by the schema,
    what says the place of a row).

    Raises BadInput, naming file and row, for what cannot be read or does not fit its field.
    """
    file = TableFile(path, files)
    form = Form(files, cells=file.cells)
    encoder = TableEncoder(schema, form, time_units={time.path: time.unit}, every_column=True)
    for batch in file.batches():
        try:
            times_us = _times(find(batch.rows, time.path), time, form)
            records = encoder.encode(batch.rows)
        except Misfit as misfit:
            raise refused(file, batch, misfit, misfit.path or time.path) from None
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None
        yield batch.first, times_us, records, file.where


def _times(array: Any, time: TimeField, form: Form) -> I64:
    if array is None:
        raise BadInput(f"no column {time.path!r}, the event's time")
    values, none = times(plain(array), form, time.unit, "us")
    if none is not None and none.any():
        raise Misfit(int(none.argmax()), time.path, "a time: every event needs one", "nothing")
    return values
