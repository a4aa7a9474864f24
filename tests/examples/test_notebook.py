"""The notebook runs as a script, draws, and shows what it says that it shows."""

import os
import subprocess
import sys
from pathlib import Path

from tests.fixtures.example_scripts import EXAMPLES


def test_the_notebook_backtests_prints_and_draws(tmp_path: Path) -> None:
    page = tmp_path / "backtest.html"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "notebook" / "backtest.py"), "--days", "4", "--html", str(page)],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent / "services")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    auc = [float(line.split()[3]) for line in done.stdout.splitlines() if " click " in line]
    before, after = auc[7], auc[8]
    assert before > 0.65, done.stdout
    assert after < before - 0.1, "readers change their minds at half-time"
    assert auc[-1] > after + 0.1, "and the model learns them anew"
    assert "vega" in page.read_text()
