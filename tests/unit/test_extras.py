"""How a package that is missing comes: from pyproject.toml's extras, and never under freshet's own name on
PyPI."""

from __future__ import annotations

import re
import tomllib

from freshet.extras import EXTRAS, how_to_install
from tests.docs.markdown import ROOT, pages

MODULES = {
    "confluent-kafka": "confluent_kafka",
    "grpcio": "grpc",
    "protobuf": "google",
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}


def brought() -> set[tuple[str, str, str]]:
    """(module, package, extra) of pyproject.toml."""
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


def test_what_is_to_be_installed_is_what_the_extra_brings() -> None:
    """A module's name is often that of somebody else's package: `grpc`, `google`."""
    for module, extra in EXTRAS.items():
        named = re.match(r"pip install ([\w -]+);", how_to_install(module))
        assert named, module
        assert {(module, package, extra) for package in named[1].split()} <= brought()


def test_nobody_is_told_to_install_the_project_that_has_freshets_name_on_pypi() -> None:
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
