"""The full disk that system tests give to running processes."""

from __future__ import annotations

import sys
from pathlib import Path

from freshet.testing.conditions import wait_until
from tests.servers.disk import Disk
from tests.servers.processes import Process

WRITES = """
import pathlib, sys, time
while True:
    try:
        pathlib.Path(sys.argv[1]).write_text("some")
    except OSError as error:
        print(error.strerror, flush=True)
        pathlib.Path(sys.argv[1] + ".refused").touch()
    time.sleep(0.01)
"""


def test_writes_fail_until_there_is_space_also_after_a_restart(
    tmp_path: Path,
) -> None:
    file, told = tmp_path / "file", tmp_path / "file.refused"
    process = Process([sys.executable, "-c", WRITES, str(file)], tmp_path / "log")
    disk = Disk(lambda: [process])

    def written() -> bool:
        return file.exists() and file.stat().st_size > 0

    def refused() -> bool:
        disk.keep_full()
        return told.exists()

    process.launch()
    try:
        wait_until("it writes", written, within_s=60)
        disk.fill()
        wait_until("it is refused", refused, within_s=60)
        process.kill()
        for left in (file, told):
            left.unlink()
        process.launch()
        wait_until("the new one is refused, too", refused, within_s=60)
        wait_until("what it says is kept", lambda: "File too large" in process.said(), within_s=60)
        disk.make_room()
        wait_until("it writes again", written, within_s=60)
    finally:
        process.kill()
