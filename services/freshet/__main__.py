"""The command `freshet`, also as `python -m freshet`: Ctrl-C ends it at once, without a traceback, unless a
verb has something to bring to an end."""

from __future__ import annotations

import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Entry point. Ends with 0, 1 (an error that is told), 2 (wrong usage), 3 (an edit needs a new model), or
    as a shell says of Ctrl-C: 130.

    Ctrl-C is the system's own until a verb takes it: an interrupt in the middle of loading native modules is
    no Python error that could be caught, some of them crash.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from freshet.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
