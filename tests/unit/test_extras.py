"""Installation commands of missing packages match the extras of pyproject.toml, and never name freshet."""

from __future__ import annotations

import re
import tomllib

from freshet.extras import EXTRAS, how_to_install
from tests.fixtures.pages import ROOT, pages

MODULES = {
    "confluent-kafka": "confluent_kafka",
    "grpcio": "grpc",
    "protobuf": "google",
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}


def brought() -> set[tuple[str, str, str]]:
    """Return (module, package, extra) of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        (MODULES.get(name, name), name, extra)
        for extra, packages in project["optional-dependencies"].items()
        for name in (re.split(r"[^\w-]", package)[0] for package in packages)
        if extra != "test" and name != "freshet"
    }


def test_the_extras_are_those_of_the_project() -> None:
    assert set(EXTRAS.items()) <= {(module, extra) for module, _, extra in brought()}
    assert {module for module, _, _ in brought()} == set(EXTRAS)


def test_the_command_installs_the_packages_of_the_extra() -> None:
    """A module's name may be another project's package, as `grpc` and `google`."""
    for module, extra in EXTRAS.items():
        named = re.match(r"pip install ([\w -]+);", how_to_install(module))
        assert named, module
        assert {(module, package, extra) for package in named[1].split()} <= brought()


def test_no_command_installs_the_pypi_project_freshet() -> None:
    files = [*pages(), *(path for part in ("services", "ops") for path in (ROOT / part).rglob("*.py"))]
    wrong = re.compile(r"pip install (?:-\S+ )*[\"']?freshet(?=[\"'\[\s`]|$)")

    found = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if wrong.search(line) and "another project" not in line
    }

    assert len(files) > 300
    assert found == set()
