"""One contract suite per protocol. An adapter is tested by a subclass in a test file:

    class TestMyLog(EventLogContract):
        @pytest.fixture
        def open_log(self, tmp_path):
            return lambda: open_url(f"mine:{tmp_path}")

pytest then runs every test of the suite on the adapter. Class attributes state the promises that an
adapter does not make.
"""

import pytest

# pytest reports what an assert of a module found only if the module is registered before it is loaded.
pytest.register_assert_rewrite(
    *(f"{__name__}.{suite}" for suite in ("batches", "eventlog", "rowservice", "rowstore", "versions"))
)
