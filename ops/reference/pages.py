"""Which pages there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ops.reference import (
    cli_page,
    errors_page,
    http_page,
    json_page,
    logs_page,
    measures_page,
    metrics_page,
    python_page,
    settings_page,
    spec_page,
    topics_page,
)


@dataclass(frozen=True, slots=True)
class Page:
    """One file of docs/reference/ and how its text is made."""

    name: str  # file name
    title: str
    about: str  # half a sentence, for the index
    text: Callable[[], str]


def index() -> str:
    """The text of docs/reference/README.md."""
    lines = [f"- [{page.title}]({page.name}): {page.about}" for page in PAGES if page.title]
    return INDEX + "\n".join(lines) + "\n" + INDEX_END


INDEX = """\
# Reference

<!-- Written by `make docs`; edit ops/reference/pages.py instead. -->

These pages are written from the code by `make docs`, and a test says when one is stale. To change a page,
change what it is written from; the comment at its top says where that is.

"""

INDEX_END = """
What stands in the records of each topic, byte for byte, is in [schemas/README.md](../../schemas/README.md),
by hand; PROTOCOL and a number name a rule of [PROTOCOL.md](../../PROTOCOL.md). Services meet in the log and
speak HTTP with clients, by setting gRPC as well ([its `.proto` files](../../schemas)); shards, embedders and
trainers that are processes of their own call each other by gRPC, in
[frames](../../schemas/README.md#frames-messages-between-services).
"""

PAGES = (
    Page("README.md", "", "", index),
    Page("feature-spec.md", "Feature spec", "every key of `freshet.toml`", spec_page.page),
    Page("settings.md", "Settings", "every `FRESHET_…` variable", settings_page.page),
    Page("cli.md", "Command", "every verb of `freshet`, with examples", cli_page.page),
    Page("measures.md", "Measures", "what quality is measured by", measures_page.page),
    Page("python.md", "Python API", "public names, protocols, contract suites", python_page.page),
    Page("topics.md", "Topics", "who writes and reads what in the log", topics_page.page),
    Page("metrics.md", "Metrics", "what each service exposes to Prometheus", metrics_page.page),
    Page("logs.md", "Logs", "keys of log lines, and every message", logs_page.page),
    Page("errors.md", "Errors", "families, codes of HTTP errors, exit status", errors_page.page),
    Page("json.md", "Events as JSON", "what is taken and refused, case by case", json_page.page),
    Page("http.md", "HTTP API", "what each service answers", http_page.page),
    *(Page(f"openapi/{a.service}.json", "", "", partial(http_page.openapi, a)) for a in http_page.APIS),
)
