"""Settings: addresses, stores and bounds of each service, parsed once into frozen objects.

The spec (`freshet.config.spec`) defines the model; settings change no prediction. They come from environment
variables `FRESHET_<SERVICE>_<OPTION>` (`FRESHET_GATEWAY_PORT=7100`). The defaults fit one machine.
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
from freshet.config.settings.common import Common, Grpc, Http, Registry, RunFolder, Traces
from freshet.config.settings.services import (
    Console,
    Embedder,
    Gateway,
    Inference,
    Joiner,
    Paramserver,
    Simulator,
    Trainer,
)
from freshet.errors import ConfigError

__all__ = [
    "SERVICES",
    "Common",
    "Console",
    "Gateway",
    "Inference",
    "RunFolder",
    "Settings",
    "load_settings",
    "variables",
]

PREFIX = "FRESHET_"
OTHERS = ("FRESHET_TEST_", "FRESHET_NATIVE_", "FRESHET_SUPERVISOR_")
"""Variables that are no settings: of tests, of the native core's instruction set and of `freshet up`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a run."""

    common: Common
    gateway: Gateway
    joiner: Joiner
    trainer: Trainer
    embedder: Embedder
    paramserver: Paramserver
    http: Http
    grpc: Grpc
    registry: Registry
    inference: Inference
    console: Console
    simulator: Simulator
    traces: Traces


SERVICES: Mapping[str, type] = get_type_hints(Settings)


@dataclass(frozen=True, slots=True)
class Variable:
    """One setting with its name in the environment."""

    name: str  # FRESHET_GATEWAY_PORT
    service: str
    option: Field[Any]


def variables() -> Iterator[Variable]:
    """Yield all settings, for the reference page and for errors."""
    for service, cls in SERVICES.items():
        for option in options_of(cls):
            yield Variable(f"{PREFIX}{service}_{key_of(option)}".upper(), service, option)


def load_settings(
    environment: Mapping[str, str] | None = None, *, run_folder: str | Path | None = None
) -> Settings:
    """Read the settings.

    Args:
        environment: variables; the process's own by default. Names without the prefix FRESHET_ are ignored.
        run_folder: overrides FRESHET_COMMON_RUN_FOLDER (a command's `--folder`).

    Raises:
        ConfigError: a variable with the prefix is unknown, or its value is bad.
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
            hint = nearest_hint(name, list(known)) or "freshet --help lists the settings"
            raise ConfigError(
                "environment", name, text, "a setting that exists, FRESHET_<SERVICE>_<OPTION>", hint
            )
        sections[known[name].service][key_of(known[name].option)] = _value(known[name], text)
    parsed: dict[str, Any] = {s: read_object(cls, _Variables(s, sections[s])) for s, cls in SERVICES.items()}
    settings = Settings(**parsed)
    return replace(settings, common=_with_urls(settings.common))


def _with_urls(common: Common) -> Common:
    """Fill in the URLs of stores in the run folder for those without one."""
    run = common.run
    return replace(
        common,
        log_url=common.log_url or run.log_url,
        rows_url=common.rows_url or run.rows_url,
        versions_url=common.versions_url or run.versions_url,
    )


def _value(variable: Variable, text: str) -> Any:
    """Convert the text to a TOML value; text that does not convert stays as it is, for the form to refuse."""
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
    """Section of a service's settings; its errors name the variable."""

    def __init__(self, service: str, values: Mapping[str, Any]) -> None:
        super().__init__("environment", service, values)

    def error(self, key: str, expected: str, hint: str = "", found: Any = None) -> ConfigError:
        name = f"{PREFIX}{self.path}_{key}".upper()
        return ConfigError("environment", name, self.raw(key) if found is None else found, expected, hint)
