"""`python -m ops.boards`: write the boards that Grafana is provisioned with."""

from __future__ import annotations

import json
from pathlib import Path

from ops.boards.boards import read_boards
from ops.boards.grafana import as_json

FOLDER = Path(__file__).parents[1] / "docker" / "config" / "grafana" / "boards"


def texts() -> dict[Path, str]:
    """{file: what stands in it}."""
    return {
        FOLDER / f"{board.uid}.json": json.dumps(as_json(board), indent=1, ensure_ascii=False) + "\n"
        for board in read_boards()
    }


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in texts().items():
        path.write_text(text)
        print(f"wrote {path.name}")
