"""Some hundred pairs of schemas; `ops/fuzz-avro --pairs 100000` tries as many as one likes."""

from __future__ import annotations

from collections import Counter

from tests.fuzz.pairs import compare_pair

PAIRS = 150


def test_random_schema_pairs_resolve_as_fastavro_resolves_them() -> None:
    counts = Counter[str]()
    for pair in range(PAIRS):
        counts += compare_pair(f"suite:{pair}", 10)

    assert counts["read"] > 500
    assert counts["refused"] > 20
    assert counts["refused by the schema"] > 50
