"""The paths through the code are no longer than their ceilings."""

from __future__ import annotations

import pytest

from ops.house.limits import read_limits, worse
from ops.house.paths import measure_paths

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


def test_no_path_has_more_modules_than_its_ceiling() -> None:
    measures = measure_paths()

    assert worse(read_limits(), measures) == [], [(one.name, one.items) for one in measures]
    for one in measures:
        assert len(one.items) > 5, "a path that is not seen has no modules"
