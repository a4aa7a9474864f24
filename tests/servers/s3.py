"""An S3 server in a process of its own: moto, which decides If-None-Match and If-Match of a PUT.

It takes requests one after another, since moto checks a condition and writes in two steps. So a race between
clients is decided as S3 decides it, by one of the two orders.

`python -m tests.servers.s3` serves at a free port until it is ended; `IGNORE_CONDITIONS` as an argument makes
it an older server, which accepts the headers and ignores them.
"""

from __future__ import annotations

import os
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

from tests.servers.processes import Process

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret"}
"""What a client of this server needs; any key is accepted."""

_LISTENS = re.compile(r"Running on (http://127\.0\.0\.1:\d+)")


class S3:
    """The server, with as many buckets as are made; they are gone when it ends."""

    def __init__(self, folder: Path, *, ignores_conditions: bool = False) -> None:
        mode = ["IGNORE_CONDITIONS"] if ignores_conditions else []
        root = Path(__file__).parents[2]
        environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'services'}"}
        self.process = Process(
            [sys.executable, "-m", "tests.servers.s3", *mode], folder / "s3.log", environment
        )

    def __enter__(self) -> S3:
        self.process.start(lambda said: _LISTENS.search(said) is not None, within_s=60)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # it holds nothing that should be kept

    @property
    def endpoint(self) -> str:
        """Where clients connect to."""
        found = _LISTENS.search(self.process.said())
        assert found is not None, "it was not started"
        return found[1]

    def make_bucket(self, name: str) -> None:
        """Make an empty bucket."""
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=30):
            pass

    def url(self, bucket: str, prefix: str = "versions") -> str:
        """A version store's URL in a bucket."""
        return f"s3://{bucket}/{prefix}?endpoint={self.endpoint}"


def _serve(*, ignore_conditions: bool) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app  # noqa: PLC0415  (the server's only)
    from werkzeug.serving import run_simple  # noqa: PLC0415

    application: Any = DomainDispatcherApplication(create_backend_app)

    def older(environ: dict[str, Any], start_response: Any) -> Any:
        environ.pop("HTTP_IF_MATCH", None)
        environ.pop("HTTP_IF_NONE_MATCH", None)
        return application(environ, start_response)

    run_simple("127.0.0.1", 0, older if ignore_conditions else application, threaded=False)


if __name__ == "__main__":
    _serve(ignore_conditions="IGNORE_CONDITIONS" in sys.argv[1:])
