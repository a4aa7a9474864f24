"""The releases that images are built with."""

from __future__ import annotations

import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ops.constraints import CONSTRAINTS, ROOT, declared, needed, text_of

PINS = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#"))


def test_every_required_package_is_pinned_to_an_allowed_release() -> None:
    asked = [need for need in declared() if need.name not in ("torch", "freshet")]

    assert len(asked) > 20
    for need in asked:
        assert need.specifier.contains(PINS[canonicalize_name(need.name)]), need


def test_constraints_follow_requirements_and_extras() -> None:
    found = needed([Requirement("redis[hiredis]"), Requirement("torch")])

    assert {"redis", "hiredis", "sympy", "mpmath"} <= set(found)
    assert "torch" not in found
    assert not [name for name in found if name.startswith("nvidia")]
    assert "pytest" not in found
    assert re.search(r"^hiredis==\d", text_of(found), re.MULTILINE)


def test_images_are_built_by_it() -> None:
    assert "PIP_CONSTRAINT=/constraints.txt" in (ROOT / "ops/docker/Dockerfile").read_text()
