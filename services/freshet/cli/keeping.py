"""The folder of a replay or a backtest: whole at the end, or not there."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from freshet.errors import ConfigError

__all__ = ["folder_of_a_pass"]


@contextmanager
def folder_of_a_pass(keep: str | Path | None) -> Iterator[Path]:
    """A run folder for one pass over recorded events.

    Args:
        keep: stays after the pass; deleted again if the pass fails or is interrupted, so that nobody takes
              half of it for the whole. None: one that is deleted in any case.

    Raises ConfigError if `keep` holds anything: a second pass into a log would teach everything twice.
    """
    if keep is None:
        with _interruptible(), tempfile.TemporaryDirectory(prefix="freshet-") as temporary:
            yield Path(temporary)
        return
    folder = Path(keep)
    is_new = not folder.exists()
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            "--keep",
            "",
            f"{folder} is not empty",
            "a folder that does not exist yet, or an empty one",
            "delete it, or name another; a second pass into one log would teach everything twice",
        )
    try:
        with _interruptible():
            yield folder
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            _empty(folder)
        raise


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt here, where there is something to clean up."""
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _empty(folder: Path) -> None:
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        shutil.rmtree(entry, ignore_errors=True)
