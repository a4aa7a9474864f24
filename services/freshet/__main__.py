"""The command `freshet`, also as `python -m freshet`.

Ctrl-C ends it at once without a traceback, unless a verb handles it.
"""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run a verb; the exit code is 0, 1 (an error), 2 (wrong usage), 3 (an edit needs a new model), or 130
    (Ctrl-C).

    SIGINT keeps its default action until a verb handles it: an interrupt while native modules load cannot be
    caught in Python, and crashes some of them.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from freshet.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
