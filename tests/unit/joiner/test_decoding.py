"""Events of hostile bytes, from the record to the trainer's columns: nothing raises, and each has one end.

`FRESHET_TEST_POISON` times 2,000 mutants of each format (20,000 otherwise).
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable

import numpy as np
import pytest

from freshet.config.avro.schema import Record, parse_schema
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.embedder.block_decoder import BlockDecoder, RefusedSamples
from freshet.features import SampleDecoder, hash_text
from freshet.joiner.decoder import SpecDecoder
from freshet.joiner.partition import Task
from freshet.joiner.plan import Topics, join_plan
from freshet.types import BytesColumn, Records
from tests.fixtures.joiner import limits_for
from tests.unit.joiner.avro_events import ACTION, SERVED, SHOWN, SPEC, Fixed, action, framed, served, wider

MUTANTS = int(os.environ.get("FRESHET_TEST_POISON", "0")) * 2_000 or 20_000
BATCH = 500
LOG_MS = 10_000
INPUTS = {"served": "served", "shown": "shown", "action": "actions"}
TOPICS = Topics(
    INPUTS, "m.samples", "m.samples.late", "m.joiner", "m.dead-letters", {}, limits_for(16 << 20), 1
)
PIECES = [
    b"\xff" * 10,
    b"\xfe\xff\xff\xff\x0f",
    b"\x00" * 4,
    b"\x01",
    b"\x80",
    b"\xed\xa0\x80",
    b'"',
    b"}",
    b"1e999",
]
Seeds = dict[str, list[bytes]]


def framed_seeds() -> Seeds:
    served_events = [
        served("a", 1_000, 1, 2),
        served("b", 9_000),
        wider("c", 2_000, 7),
        b"\0\0\0\0\x63" + b"x" * 9,
    ]
    shown = [framed(3, SHOWN, r="a", id=1, ts=1.5)]
    actions = [action("a", 1, 1_500), action("c", 7, 2_500, "play", 5.0), action("a", 2, 1_600, "play", None)]
    return {"served": served_events, "shown": shown, "action": actions}


def bare_seeds() -> Seeds:
    return {role: [value[5:] for value in values] for role, values in framed_seeds().items()}


def json_seeds() -> Seeds:
    page = {"r": "a", "ts": 1_000, "items": [{"id": 1, "p": 0.5}, {"id": 2, "p": 1}], "after": "!", "new": 1}
    click = {"r": "a", "id": 2, "e": "x", "ts": 1_100, "type": "click", "seconds": None}
    shown = {"r": "a", "id": 2, "ts": 1.05}
    return {
        "served": [json.dumps(page).encode(), json.dumps({**page, "r": "é", "items": []}).encode()],
        "shown": [json.dumps(shown).encode()],
        "action": [json.dumps(click).encode(), json.dumps({**click, "type": "play", "seconds": 3}).encode()],
    }


FORMATS: dict[str, Callable[[], Seeds]] = {"avro": framed_seeds, "bare": bare_seeds, "json": json_seeds}


def mutant(chance: random.Random, seeds: list[bytes]) -> bytes:
    """Return a seed with bytes changed, removed, repeated or inserted; sometimes unchanged."""
    value = bytearray(chance.choice(seeds))
    for _ in range(chance.choice([0, 1, 1, 1, 2, 3])):
        at = chance.randrange(len(value) + 1)
        match chance.randrange(5):
            case 0 if at < len(value):
                value[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(value):
                value[at] = chance.randrange(256)
            case 2:
                del value[at:]
            case 3:
                value[at:at] = chance.choice(PIECES)
            case _:
                value[at:at] = value[: chance.randrange(len(value) + 1)]
    return bytes(value)


@pytest.mark.long
@pytest.mark.parametrize("form", FORMATS)
def test_mutants_of_events_raise_nothing(form: str) -> None:
    chance = random.Random(form)
    text = SPEC
    for topic in INPUTS.values() if form != "avro" else ():
        text = text.replace(f'topic = "{topic}",', f'topic = "{topic}", format = "{form}",')
    spec, schemas = parse_spec(text.replace("[serve]", "[serve]\nlog_served = false")), Fixed()
    frameless: dict[str, Record] = {
        role: parse_schema(json.dumps(schema))
        for role, schema in (("served", SERVED), ("shown", SHOWN), ("action", ACTION))
    }
    plan = join_plan(spec, hash_text)
    task = Task(0, plan, TOPICS, SpecDecoder(spec, plan, schemas, frameless), dict.fromkeys(INPUTS, 0))
    letters: list[bytes] = []
    refused = RefusedSamples(letters.extend, lambda: 0.0)
    samples = SampleDecoder(spec, layout_of(spec), schemas.get)
    trainer = BlockDecoder(samples, len(spec.labels), refused)
    joined = learned = sent = 0

    def flush() -> None:
        nonlocal joined, learned
        outputs = task.flush(LOG_MS)
        joined += outputs.samples
        for append in outputs.appends:
            if append.topic == TOPICS.samples:
                places = ((0, np.arange(len(append.values))),)
                learned += len(trainer.decode(append.values, places).sample_ids)
        task.on_appended(outputs, 0)

    seeds = FORMATS[form]()
    while sent < MUTANTS:
        role = chance.choice(list(INPUTS))
        values = [mutant(chance, seeds[role]) for _ in range(BATCH)]
        start = task.next[role]
        offsets = np.arange(start, start + BATCH, dtype=np.int64)
        keys = BytesColumn.of([b""] * BATCH)
        task.join_records(
            role,
            Records(offsets, np.full(BATCH, LOG_MS, np.int64), keys, BytesColumn.of(values), start + BATCH),
        )
        sent += BATCH
        flush()
    task.watermark.close(task.joiner.horizon_ms)
    flush()
    assert task.refused > sent // 20, "mutants are refused"
    assert learned > 0, "and some are learned from"
    assert joined == learned + sum(refused.counts().values())
    ledger = task.ledger()
    assert all(counts["pending"] == 0 for counts in ledger.labels.values())
