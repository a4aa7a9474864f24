"""Former public names still work, and name the new ones."""

import importlib
import sys

import pytest

from freshet.log import EventLog
from freshet.rows.store import RowStore
from freshet.versions import VersionStore


def test_adapters_may_still_import_the_former_protocol_names() -> None:
    sys.modules.pop("freshet.seams", None)
    with pytest.warns(DeprecationWarning, match=r"freshet\.versions instead of freshet\.seams\.versions"):
        importlib.import_module("freshet.seams.versions")
    former = ("eventlog", "rowstore", "versions")
    found = [importlib.import_module(f"freshet.seams.{name}") for name in former]
    assert [found[0].EventLog, found[1].RowStore, found[2].VersionStore] == [EventLog, RowStore, VersionStore]
