"""The compose files as the engine would read them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import yaml

from tests.fixtures.pages import ROOT

COMPOSE, TOKENS = (
    yaml.safe_load((ROOT / name).read_text())["services"]
    for name in ("docker-compose.yml", "compose.tokens.yml")
)


def filled(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1]) or found[2], text)
