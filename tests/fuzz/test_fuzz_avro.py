"""A few thousand of the random records; `python -m tests.fuzz` reads as many as one likes."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fuzz.compare import compare_schema
from tests.fuzz.judge import Judge, Refused

SCHEMAS = 12


def test_records_and_mutants_are_read_or_refused_as_by_fastavro() -> None:
    counts = Counter[str]()
    for schema in range(SCHEMAS):
        counts += compare_schema(f"suite:{schema}", 200)

    refused = [what for what in counts if what.startswith("refused")]
    assert counts["read"] > 1000
    assert len(refused) >= 6, "mutants reach most of the rules"


def test_the_judge_names_the_rule_by_which_a_record_is_refused() -> None:
    judge = Judge(
        {"type": "record", "name": "R", "fields": [{"name": "a", "type": "boolean"}]},
        wanted=lambda _: True,
        strict=True,
    )
    assert judge.check(b"\1")
    for record, rule in ((b"", "ends inside"), (b"\2", "neither 0 nor 1"), (b"\1\1", "after the last field")):
        with pytest.raises(Refused, match=rule):
            judge.check(record)
