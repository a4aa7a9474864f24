"""A storage adapter of a third party: found by its entry point, held to the contract, used by processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import freshet
from freshet.adapters import open_versions
from freshet.apps.local import local
from freshet.errors import ConfigError
from freshet.testing.conditions import wait_until
from tests.fixtures.commands import LEDGER, status
from tests.fixtures.distributions import distribution

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom-store"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder where the example is installed."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    code = (EXAMPLE / "versions_in_one_file.py").read_text()
    distribution(tmp_path / "site", "versions_in_one_file", project["entry-points"], code)
    return tmp_path / "site"


def test_a_scheme_is_known_once_its_distribution_is_there(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"versionfile:{tmp_path}/versions.db"
    with pytest.raises(ConfigError, match="is the distribution that provides this scheme installed"):
        open_versions(url)

    monkeypatch.syspath_prepend(str(site))

    store = open_versions(url)
    assert list(store.numbers()) == []
    store.close()


def test_the_adapter_passes_the_suite_that_comes_with_freshet(site: Path) -> None:
    path = os.pathsep.join([str(site), str(Path(freshet.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.system
@pytest.mark.timeout(180)
def test_trainer_and_inference_meet_in_the_adapter(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.pathsep.join([str(site), str(Path(freshet.__file__).parents[1])])
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("FRESHET_COMMON_VERSIONS_URL", f"versionfile:{tmp_path}/versions.db")

    with local(LEDGER, folder=tmp_path / "run", ready_s=120) as system:
        wait_until("version 0 serves", lambda: status(system, "inference").get("version") == 0, within_s=60)
        for command in (["status"], ["version", "list"]):
            done = subprocess.run(
                [sys.executable, "-m", "freshet", *command, "--folder", str(tmp_path / "run")],
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr

    assert not list((tmp_path / "run" / "versions").glob("0*"))
