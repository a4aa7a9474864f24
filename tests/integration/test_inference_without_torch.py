"""A model that needs torch, on an inference server that has none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as if it were not installed
from freshet.__main__ import main
main()
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    text = (EXAMPLES / "quickstart" / "freshet.toml").read_text()
    for schema in (EXAMPLES / "quickstart").glob("*.avsc"):
        (tmp_path / schema.name).write_bytes(schema.read_bytes())
    path = tmp_path / "freshet.toml"
    path.write_text(text.replace("[model]", '[model]\nkind = "dlrm"').replace("crosses =", "# crosses ="))
    return path


def test_it_ends_at_the_start_and_says_what_is_missing(spec: Path, tmp_path: Path) -> None:
    command = ["run", "inference", str(spec), "--folder", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 1
    assert "the package torch is not installed" in done.stderr
