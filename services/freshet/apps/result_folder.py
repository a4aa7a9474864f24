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
    """Signals that would end the process at once raise here, where there is something to clean up."""
    main = threading.current_thread() is threading.main_thread()
    ours = [s for s in _ENDING if main and signal.getsignal(s) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C; the end that a scheduler's time limit or a machine's shutdown brings; a terminal that is closed."""


def _raise(number: int, _frame: object) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)  # as shells say


def _empty(folder: Path) -> None:
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
