"""Variables to settings: read once; an unknown name or a bad value stops the start and says what is
allowed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from freshet.config.options import (
    Boolean,
    Integer,
    Number,
    Section,
    key_of,
    nearest_hint,
    options_of,
    read_object,
)
from freshet.config.settings.classes import Common, Settings
from freshet.errors import ConfigError

__all__ = ["Variable", "load_settings", "variables"]

PREFIX = "FRESHET_"
OTHERS = ("FRESHET_TEST_", "FRESHET_NATIVE_", "FRESHET_SUPERVISOR_")
"""Variables of the tests, of the native core's choice of instruction set and of `freshet up`; not settings.
"""

SERVICES: Mapping[str, type] = get_type_hints(Settings)


@dataclass(frozen=True, slots=True)
class Variable:
    """One setting as the environment spells it."""

    name: str  # FRESHET_GATEWAY_PORT
    service: str
    option: Field[Any]


def variables() -> Iterator[Variable]:
    """Every setting there is, for the reference and the errors."""
    for service, cls in SERVICES.items():
        for option in options_of(cls):
            yield Variable(f"{PREFIX}{service}_{key_of(option)}".upper(), service, option)


def load_settings(
    environment: Mapping[str, str] | None = None, *, run_folder: str | Path | None = None
) -> Settings:
    """Read the settings.

    Args:
        environment: names and texts; the process's own without it. Names without our prefix are not
            looked at.
        run_folder: takes the place of FRESHET_COMMON_RUN_FOLDER (a command line's `--folder`).

    Raises:
        ConfigError: for a variable that is unknown or has a bad value.
    """
    given = dict(os.environ if environment is None else environment)
    if run_folder is not None:
        given["FRESHET_COMMON_RUN_FOLDER"] = str(run_folder)
    known = {v.name: v for v in variables()}
    sections: dict[str, dict[str, Any]] = {service: {} for service in SERVICES}
    for name, text in given.items():
        if not name.startswith(PREFIX) or name.startswith(OTHERS):
            continue
        if name not in known:
            hint = nearest_hint(name, list(known)) or "freshet --help says which there are"
            raise ConfigError(
                "environment", name, text, "a setting that exists, FRESHET_<SERVICE>_<OPTION>", hint
            )
        sections[known[name].service][key_of(known[name].option)] = _value(known[name], text)
    parsed: dict[str, Any] = {s: read_object(cls, _Variables(s, sections[s])) for s, cls in SERVICES.items()}
    settings = Settings(**parsed)
    return replace(settings, common=_with_urls(settings.common))


def _with_urls(common: Common) -> Common:
    """Stores that were not named stand in the run folder."""
    run = common.run
    return replace(
        common,
        log_url=common.log_url or f"sqlite:{run.log}",
        rows_url=common.rows_url or f"sqlite:{run.rows / 'rows.sqlite'}",
        versions_url=common.versions_url or f"file:{run.versions}",
    )


def _value(variable: Variable, text: str) -> Any:
    """The TOML value that the text stands for; a text that stands for none is left for the form to refuse."""
    form = variable.option.metadata["form"]
    try:
        if isinstance(form, Integer):
            return int(text)
        if isinstance(form, Number):
            return float(text)
    except ValueError:
        return text
    if isinstance(form, Boolean):
        return {"true": True, "false": False}.get(text.lower(), text)
    return text


class _Variables(Section):
    """A service's settings; errors name the variable, not a path of keys."""

    def __init__(self, service: str, values: Mapping[str, Any]) -> None:
        super().__init__("environment", service, values)

    def error(self, key: str, expected: str, hint: str = "", found: Any = None) -> ConfigError:
        name = f"{PREFIX}{self.path}_{key}".upper()
        return ConfigError("environment", name, self.raw(key) if found is None else found, expected, hint)
