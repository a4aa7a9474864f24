"""The descriptions of routes: valid, complete, and with every code that is used."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from freshet.http.endpoint import CODES
from ops.reference.http_page import APIS, Api, openapi

PACKAGE = Path(__file__).parents[2] / "services" / "freshet"


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.service)
def test_each_document_is_valid_openapi(api: Api) -> None:
    errors = OpenAPIV31SpecValidator(json.loads(openapi(api))).iter_errors()

    assert [e.message for e in errors] == []


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.service)
def test_each_route_is_described_in_full(api: Api) -> None:
    for endpoint in api.endpoints:
        where = f"{endpoint.method} {endpoint.path}"
        assert endpoint.summary.endswith("."), where
        assert any(a.status < 300 for a in endpoint.answers), where
        assert len({a.status for a in endpoint.answers}) == len(endpoint.answers), where
        assert endpoint.bodies or endpoint.method == "GET", where
        names = {p.name for p in endpoint.parameters if p.where == "path"}
        assert names == {p[1:-1] for p in endpoint.path.split("/") if p.startswith("{")}, where
        for answer in endpoint.answers:
            assert answer.doc, f"{where} {answer.status}: say what it means"


def codes_used() -> Iterator[tuple[str, int, str]]:
    """(file:line, status, code) of every HttpError in the package."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("HttpError"):
                status, code = (ast.literal_eval(a) for a in node.args[:2])
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", status, code


def test_every_code_of_an_error_is_described_and_no_other() -> None:
    known = {(c.code, c.status) for c in CODES}
    used = {(code, status): where for where, status, code in codes_used()}

    assert {k: w for k, w in used.items() if k not in known} == {}, "describe it in http/endpoint.py"
    assert known - set(used) == {("events_refused", 422)}  # written by the gateway's own answer
