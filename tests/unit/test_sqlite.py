"""The common part of the SQLite adapters."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from freshet.rows.sqlite.file import FORMAT
from freshet.sqlite import WAL_BYTES, connect, open_file


@pytest.mark.parametrize("page_bytes", [16384, 65536])
def test_the_wal_limit_does_not_depend_on_the_page_size(tmp_path: Path, page_bytes: int) -> None:
    path = tmp_path / "rows.sqlite"
    open_file(path, replace(FORMAT, page_bytes=page_bytes))
    with contextlib.closing(connect(path, FORMAT)) as db:
        assert db.execute("PRAGMA page_size").fetchone() == (page_bytes,)
        (pages,) = db.execute("PRAGMA wal_autocheckpoint").fetchone()
    assert pages * page_bytes == WAL_BYTES
