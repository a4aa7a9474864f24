"""What all tests share: how hypothesis behaves on machines that are shared and slow at times."""

from hypothesis import HealthCheck, settings

# A deadline per example measures the machine, not the code; the timeout of each test still bounds it.
settings.register_profile("freshet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("freshet")
