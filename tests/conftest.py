"""What all tests share: how hypothesis behaves on machines that are shared and slow at times."""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.servers.fixtures"]

# A deadline per example measures the machine, not the code; the timeout of each test still bounds it.
settings.register_profile("freshet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("freshet")

# Processes that tests start find the package as the tests do.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1] / "services"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
