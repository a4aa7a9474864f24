"""Another uvicorn than ours is refused by name, before a connection of it is made."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from freshet.errors import ConfigError
from freshet.http.connection import Connection
from freshet.http.uvicorn_release import INSTALL, OF_CONNECTIONS, OF_SERVERS, refuse_other_uvicorn

ROOT = Path(__file__).parents[3]


def made(names: tuple[str, ...], without: str = "") -> type:
    return type("Made", (), {name: None for name in names if name != without})


@pytest.mark.parametrize("lacking", ["_start_asgi_task", "send_400_response", "_serve"])
def test_a_uvicorn_that_lacks_what_we_take_over_is_refused_with_what_to_install(lacking: str) -> None:
    with pytest.raises(ConfigError) as raised:
        refuse_other_uvicorn(made(OF_CONNECTIONS, lacking), made(OF_SERVERS, lacking), "0.40.0")

    said = str(raised.value)
    assert "0.40.0" in said
    assert lacking in said
    assert INSTALL in said


def test_the_one_that_is_installed_is_taken() -> None:
    refuse_other_uvicorn(HttpToolsProtocol, uvicorn.Server, uvicorn.__version__)


def test_each_method_of_uvicorns_that_a_connection_takes_over_is_looked_for() -> None:
    ours = {n for n, what in vars(Connection).items() if callable(what) and hasattr(HttpToolsProtocol, n)}
    of_asyncio = {"connection_made", "connection_lost", "data_received"}
    of_httptools = {"on_message_begin", "on_headers_complete", "on_body", "on_message_complete"}

    assert "_start_asgi_task" in ours
    assert ours - of_asyncio - of_httptools <= set(OF_CONNECTIONS)


def test_what_pip_is_told_is_what_the_error_says() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {(extra, r) for extra, needs in extras.items() for r in needs if r.startswith("uvicorn")}

    assert wanted == {(extra, INSTALL) for extra in ("gateway", "inference", "console")}
