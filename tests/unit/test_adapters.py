from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from freshet import adapters
from freshet.adapters import open_eventlog, open_rowstore, open_versions
from freshet.errors import ConfigError
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.sqlite import folder_of
from freshet.versions.folder import FolderVersionStore


def test_built_in_schemes_need_no_installed_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "entry_points", lambda group: ())
    log = open_eventlog(f"sqlite:{tmp_path}/log")
    assert isinstance(log, SqliteEventLog)
    log.close()
    assert isinstance(open_versions(f"file:{tmp_path}/versions"), FolderVersionStore)


def test_a_third_party_scheme_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("disk", "freshet.versions.folder:open_url", "freshet.versions")
    monkeypatch.setattr(adapters, "entry_points", lambda group: (point,))
    assert isinstance(open_versions(f"disk:{tmp_path}/versions"), FolderVersionStore)


def test_an_adapter_without_a_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("upper", "builtins:str", "freshet.eventlog")
    monkeypatch.setattr(adapters, "entry_points", lambda group: (point,))
    with pytest.raises(
        ConfigError, match=r"(?s)'upper:'.*freshet\.log\.EventLog.*builtins\.str lacks.*group_writer"
    ):
        open_eventlog("upper://user:secret@host")


def test_an_unknown_scheme_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"(?s)rowstore: url = 'sqllite:/x'.*sqlite:.*did you mean sqlite:"):
        open_rowstore("sqllite:/x")


@pytest.mark.parametrize("url", ["", "/plain/path", "sqlite", "sqlite:", "sqlite://host/path"])
def test_a_url_without_scheme_or_path_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_eventlog(url)


@pytest.mark.parametrize(
    ("url", "path"),
    [("sqlite:/a/b", "/a/b"), ("sqlite:///a/b", "/a/b"), ("sqlite:a/b", "a/b"), ("file:./x", "x")],
)
def test_a_url_names_a_path(url: str, path: str) -> None:
    assert folder_of(url) == Path(path)
