"""Commands on pages show no token to other users of a machine: they see all arguments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fixtures.pages import ROOT, pages

SHOWN = [*pages(), *ROOT.glob("*.yml"), *(ROOT / "ops" / "docker").rglob("*.yml")]
IN_ARGUMENTS = re.compile(r"(?:-H|--header)[ =]*[\"']?Authorization:|--oauth2-bearer|(?:-u|--user)[ =]\S+:")


@pytest.mark.parametrize("path", SHOWN, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_token_stands_among_a_commands_arguments(path: Path) -> None:
    assert IN_ARGUMENTS.findall(path.read_text(encoding="utf-8")) == []
