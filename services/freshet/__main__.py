"""The command `freshet`, also as `python -m freshet`: Ctrl-C while it loads leaves no traceback."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point. Ends with 0, 1 (an error that is told), 2 (wrong usage), 3 (an edit needs a new model) or
    130 (Ctrl-C)."""
    try:
        from freshet.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
