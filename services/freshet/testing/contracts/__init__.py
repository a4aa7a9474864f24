"""One contract suite per seam. An adapter passes it by subclassing, in a test file of its own:

    class TestMyLog(EventLogContract):
        @pytest.fixture
        def open_log(self, tmp_path):
            return lambda: open_url(f"mine:{tmp_path}")

pytest then runs every test of the suite on the adapter. Adapters that promise less say so in class
attributes.
"""
