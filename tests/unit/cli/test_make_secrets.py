"""The tokens that `docker compose up` makes: their hashes fit, and what operators change stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from freshet.runtime.token_file import read_tokens
from freshet.runtime.tokens import shown

ROOT = Path(__file__).parents[3]


def make(folder: Path) -> None:
    for name in ("secrets", "authority"):
        (folder / name).mkdir(exist_ok=True)
    folders = [folder / "secrets", folder / "authority"]
    command = [sys.executable, str(ROOT / "ops/docker/make-secrets"), *map(str, folders), "shard-0", "kafka"]
    path = {**os.environ, "PYTHONPATH": str(ROOT / "services")}
    subprocess.run(command, check=True, env=path, timeout=60, stdout=subprocess.DEVNULL)


def test_each_token_is_known_by_its_name_and_scopes(tmp_path: Path) -> None:
    make(tmp_path)
    folder = tmp_path / "secrets"
    entries = read_tokens(folder / "tokens")

    for name, scopes in (
        ("send", {"send"}),
        ("rank", {"rank"}),
        ("operate", {"operate"}),
        ("client", {"send", "rank"}),
    ):
        found = shown((folder / f"{name}.token").read_bytes().strip(), entries)
        assert found is not None
        assert (found.name, set(found.scopes)) == (name, scopes)
        assert (folder / f"{name}.token").stat().st_mode & 0o777 == 0o440


def test_a_token_that_was_dropped_is_not_made_again(tmp_path: Path) -> None:
    make(tmp_path)
    file = tmp_path / "secrets" / "tokens"
    left = [line for line in file.read_text().splitlines() if not line.startswith("send ")]
    file.chmod(0o640)
    file.write_text("\n".join(left) + "\n")
    make(tmp_path)

    assert [e.name for e in read_tokens(file)] == ["rank", "operate", "client"]
