"""The boards as `boards.toml` describes them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("boards.toml")


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over time of one or more queries."""

    title: str
    unit: str  # Grafana's: "short", "s", "bytes", "percentunit", "ops", "Bps"
    queries: tuple[tuple[str, str], ...]  # (PromQL, legend)
    doc: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels side by side."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """A page."""

    uid: str
    title: str
    rows: tuple[Row, ...]


def read_boards(file: Path = FILE) -> tuple[Board, ...]:
    """All boards, in the order of the file."""
    boards = tomllib.loads(file.read_text())["board"]
    return tuple(
        Board(
            board["uid"],
            board["title"],
            tuple(
                Row(
                    row["title"],
                    tuple(
                        Panel(
                            p["title"],
                            p["unit"],
                            tuple((expr, legend) for expr, legend in p["queries"]),
                            p.get("doc", ""),
                        )
                        for p in row["panels"]
                    ),
                )
                for row in board["row"]
            ),
        )
        for board in boards
    )
