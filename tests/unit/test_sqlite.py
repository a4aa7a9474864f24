"""The common part of the SQLite adapters."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from freshet.errors import Unavailable
from freshet.rows.sqlite.file import FORMAT
from freshet.sqlite import WAL_BYTES, connect, open_file, transaction


@pytest.mark.parametrize("page_bytes", [16384, 65536])
def test_the_wal_limit_does_not_depend_on_the_page_size(tmp_path: Path, page_bytes: int) -> None:
    path = tmp_path / "rows.sqlite"
    open_file(path, replace(FORMAT, page_bytes=page_bytes))
    with contextlib.closing(connect(path, FORMAT)) as db:
        assert db.execute("PRAGMA page_size").fetchone() == (page_bytes,)
        (pages,) = db.execute("PRAGMA wal_autocheckpoint").fetchone()
    assert pages * page_bytes == WAL_BYTES


def test_a_transaction_follows_one_whose_commit_failed(tmp_path: Path) -> None:
    """SQLite leaves a transaction open whose COMMIT failed: here a reference to no row, checked then."""
    path = tmp_path / "rows.sqlite"
    schema = """CREATE TABLE rows (id INTEGER PRIMARY KEY);
        CREATE TABLE uses (id INTEGER REFERENCES rows DEFERRABLE INITIALLY DEFERRED);"""
    open_file(path, replace(FORMAT, schema=schema))
    with contextlib.closing(connect(path, FORMAT)) as db:
        db.execute("PRAGMA foreign_keys=ON")
        with pytest.raises(Unavailable, match="not known whether it"), transaction(db, path, "flush"):
            db.execute("INSERT INTO uses VALUES (7)")
        with transaction(db, path, "flush"):
            db.execute("INSERT INTO rows VALUES (8)")
        assert db.execute("SELECT id FROM rows UNION ALL SELECT id FROM uses").fetchall() == [(8,)]
