"""Code of the user's, end to end: a network and a transform that stand beside their spec are trained and
served by the processes of `freshet up`, go on from a version, and served scores are what training would say.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

import freshet
from freshet.adapters import open_eventlog, open_rowstore, open_versions
from freshet.apps.local import Local, local
from freshet.config.avro.schema import sample_schema
from freshet.config.settings import load_settings
from freshet.config.spec import Spec, load_spec
from freshet.config.spec.identity import identity_hash
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Gate
from freshet.config.spec.schemas import load_schemas
from freshet.config.spec.topics import topics_of
from freshet.features import JsonTranscoder, SampleDecoder
from freshet.log.topics import ModelContext
from freshet.model import build_model
from freshet.model.inputs import GroupInputs, ModelInputs
from freshet.rows.service import KeyGroup
from freshet.tables import Plan
from freshet.testing.conditions import wait_until
from freshet.types import F32
from tests.fixtures.commands import drain, own_ports, status, told_by, url_of
from tests.fixtures.trainers import own_trainer, shard_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(280)]

EXAMPLES = Path(__file__).parents[2] / "examples"
REQUESTS = 40
CANDIDATES = 6  # of a request of the examples
READY_S = 120.0  # torch is imported three times, on whatever else this machine does


@dataclass(frozen=True)
class Example:
    """An example's folder, and rows to score: fields of a sample, by path."""

    name: str
    rows: tuple[dict[str, Any], ...]

    def spec(self) -> Spec:
        """Its spec, with a gate that lets every finite version serve."""
        spec = load_spec(EXAMPLES / self.name / "freshet.toml")
        gate = Gate(ne_worse=10.0, calibration=(0.0, 1000.0))
        return replace(spec, serve=replace(spec.serve, gate=gate))

    def play(self, system: Local) -> None:
        """Let its readers or visitors ask and click."""
        file = EXAMPLES / self.name / "run.py"
        found = importlib.util.spec_from_file_location(f"run_{self.name.replace('-', '_')}", file)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        module.play(system, REQUESTS)


MODEL = Example(
    "custom-model",
    tuple(
        {"reader": f"reader-{n}", "items.article": f"{topic}-1", "items.topic": topic, "items.age_s": age}
        for n, topic, age in (
            (0, "politics", 5.0),
            (1, "politics", 80_000.0),
            (1, "sport", 5.0),
            (99, "new", 0.0),
        )
    ),
)
TRANSFORM = Example(
    "custom-transform",
    tuple(
        {"visitor": f"visitor-{n}", "items.ctr": ctr}
        for n, ctr in ((0, 0.5), (0, 0.0005), (1, 0.0), (1, 1.0), (99, 0.02))
    ),
)


def infer(system: Local, spec: Spec, rows: Sequence[dict[str, Any]]) -> F32:
    """(B, L) predictions by the Open Inference Protocol, which logs nothing."""
    inputs = [
        {
            "name": name,
            "datatype": "BYTES" if isinstance(rows[0][name], str) else "FP64",
            "shape": [len(rows)],
            "data": [row[name] for row in rows],
        }
        for name in rows[0]
    ]
    answer = httpx.post(
        f"{url_of(system, 'inference')}/v2/models/{spec.name}/infer", json={"inputs": inputs}, timeout=30
    )
    outputs = {one["name"]: one["data"] for one in answer.raise_for_status().json()["outputs"]}
    return np.array([outputs[label.name] for label in spec.labels], np.float32).T


def trained(spec: Spec, folder: Path, rows: Sequence[dict[str, Any]]) -> tuple[int, F32]:
    """The stable version, and what the trainer's decoder, rows and that version's weights say of the rows."""
    common = load_settings(run_folder=folder).common
    log, rows_store = open_eventlog(common.log_url), open_rowstore(common.rows_url)
    versions = open_versions(common.versions_url)
    schemas, layout = load_schemas(spec), layout_of(spec)
    sample = sample_schema(schemas.served, spec.events.served.explode)
    context = ModelContext.open(spec, identity_hash(spec, schemas), log)
    training = own_trainer(context, rows_store, versions)
    try:
        nested = [{"request_id": "r", "ts": 0, "items": {"article": "-"}, **as_sample(row)} for row in rows]
        made = JsonTranscoder(sample).body(orjson.dumps(nested))
        assert not made.bad, made.bad
        decoder = SampleDecoder(spec, layout, lambda _: sample)
        batch = decoder.decode(made.records, 0, np.zeros(len(rows), np.int64), serving=True)
        groups = []
        for g, (keys, group) in enumerate(zip(batch.groups, layout.groups, strict=True)):
            tables = [spec.table(spec.features[f].table or "").id for f in group.features]
            plan = Plan(tables=np.array(tables, np.uint8), buckets=spec.buckets)
            values = np.empty((plan.build(keys.keys, keys.feature_starts), group.width), np.float32)
            asked = KeyGroup(g, plan.keys, plan.tables, plan.bucket_starts)
            shard_of(training).lookup([asked], [values], create=False)
            groups.append(GroupInputs(values, plan.positions.copy(), keys.feature_starts, keys.list_ends))
        number = versions.aliases()["stable"]
        model = build_model(spec, training=False)
        model.load_state(versions.get(number).tensors, weights_only=True)
        return number, model.score(ModelInputs(batch.size, groups, batch.dense, None)).copy()
    finally:
        training.stop()
        training.run()  # nothing is left to do: it releases its claims
        versions.close()
        rows_store.close()
        log.close()


def as_sample(row: dict[str, Any]) -> dict[str, Any]:
    """Fields by path, nested."""
    items = {path.removeprefix("items."): v for path, v in row.items() if path.startswith("items.")}
    outer = {path: v for path, v in row.items() if not path.startswith("items.")}
    return {**outer, "items": {"article": "-", **items}}


def come_to_rest(system: Local, spec: Spec, folder: Path, impressions: int) -> None:
    """Wait until all that was served so far is joined, trained on and in a version."""
    log = open_eventlog(load_settings(run_folder=folder).common.log_url)
    try:
        drain(system, folder, log, topics_of(spec), impressions)
    finally:
        log.close()


@pytest.mark.parametrize("example", [MODEL, TRANSFORM], ids=lambda e: e.name)
def test_code_of_ones_own_is_trained_served_and_gone_on_with(example: Example, tmp_path: Path) -> None:
    spec, folder = example.spec(), tmp_path / "run"
    with local(spec, folder=folder, ready_s=READY_S) as system:
        example.play(system)
        come_to_rest(system, spec, folder, REQUESTS * CANDIDATES)

    number, expected = trained(spec, folder, example.rows)
    assert number > 0
    assert len(np.unique(expected)) > 1

    with local(spec, folder=folder, ready_s=READY_S) as system:
        wait_until(
            "that version is served",
            lambda: status(system, "inference").get("version") == number,
            within_s=60,
        )
        np.testing.assert_allclose(infer(system, spec, example.rows), expected, rtol=1e-5)
        steps = told_by(system, "trainer")["steps"]
        assert steps > 0
        example.play(system)
        come_to_rest(system, spec, folder, 2 * REQUESTS * CANDIDATES)
        assert told_by(system, "trainer")["steps"] > steps


def test_a_transform_with_changed_code_is_refused_at_the_start(tmp_path: Path) -> None:
    for file in (EXAMPLES / "custom-transform").iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    folder = tmp_path / "run"
    with local(tmp_path / "freshet.toml", folder=folder, ready_s=120):
        pass
    module = tmp_path / "my_transforms.py"
    module.write_text(module.read_text().replace("np.log(rate", "np.log1p(rate"))

    said = up(tmp_path / "freshet.toml", folder)

    assert "features.ctr.dense: my_transforms:log_odds(floor=0.001), standard makes" in said
    assert "version 0 was trained when it made" in said


def test_up_refuses_an_untrainable_model_before_it_starts(tmp_path: Path) -> None:
    for file in (EXAMPLES / "custom-model").iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    module = tmp_path / "two_towers.py"
    module.write_text(module.read_text().replace(".sum(2)", ".sum((1, 2))"))

    said = up(tmp_path / "freshet.toml", tmp_path / "run")

    assert "model.kind = 'two_towers:TwoTowers'" in said
    assert "logits of shape (8, 1) from its forward, one column a label" in said
    assert not (tmp_path / "run").exists()


def up(spec_file: Path, folder: Path) -> str:
    """What `freshet up` says as it refuses."""
    command = [sys.executable, "-m", "freshet.cli", "up", str(spec_file), "--folder", str(folder)]
    environment = {
        **os.environ,
        **own_ports(),
        "PYTHONPATH": str(Path(freshet.__file__).parents[1]),
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 1, done.stderr
    return done.stderr
