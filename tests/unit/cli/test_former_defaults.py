"""Stores, versions and peers of a spec that an earlier release read with other defaults."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from freshet.adapters import open_eventlog, open_rowstore
from freshet.apps.recorded_spec import keep_spec, kept_spec, load_kept, refuse_another_model
from freshet.cli import prepare
from freshet.cli.check import command as check
from freshet.config.options import default_of, key_of, options_of
from freshet.config.settings import Settings, load_settings
from freshet.config.spec import Spec, load_spec, model
from freshet.config.spec.identity import SpecHash, explain_defaults, identity_hash
from freshet.config.spec.parse import parse_spec, with_defaults
from freshet.config.spec.schemas import load_schemas
from freshet.errors import ConfigError, Mismatch
from freshet.inference.rows import RowFollower
from freshet.inference.versions import VersionFollower
from freshet.rows.store import StoreIdentity, check_identity
from freshet.trainer.state_sync import DenseState
from freshet.trainer.version_writer import restart_point
from freshet.types import Bucket, BucketMeta, Fence, TimeMs
from freshet.versions import Manifest
from freshet.versions.folder import open_url

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "examples" / "quickstart" / "freshet.toml"

WHAT_TO_DO = """\
  The hash found is the hash of this spec with `defaults = 1`; the spec now has `defaults = 2`.
  To continue with that model unchanged, put `defaults = 1` at the top of the spec.
  To start a new model with `defaults = 2`, use another name, or a new store."""

HASHES = {  # as the last release without the key `defaults` hashed them: without, and with, their schemas
    "examples/custom-model": (
        "20528d3064fa1b8f6c9fed9db64a0bdbb7575d0ec998c8fbdab43bd6991e4c3c",
        "bc30770d27922bd25f5db1f2aefb4ff22ce6f27670faece07811797c20dfbe4b",
    ),
    "examples/custom-transform": (
        "d1ffe36bd92c6f4bef7a27e0c6d1ae3b1228f920883916bfd44281932d515046",
        "148728504dd8ffe08049c5f778de62dbe469fcc19b1710e1ff4b789459786e7c",
    ),
    "examples/feed": (
        "26ea739bccbbd1f96020fd859913bae98411b2fb0422c408e335fea1dccd364d",
        "0eb5a539452c2e61ed83f1d6f7c48b43450324e7fcf1e99fa571650556fb276e",
    ),
    "examples/online-retail": (
        "88964cd8ad01459c33fcfb0965920c4e2f6b11a90eedd68fa89b4a47e58da3a7",
        "6e034466943921115c6864a06a17b58fb93024899c54db978715a6f8a5a8c209",
    ),
    "examples/own-topics": (
        "7141c2866395769f450c6dfd924508177b2a6b8319848b8ca11603e72ededcde",
        "ac5291a647803e7214b5b2ec7cdf4fe7fb94fbe55627de5c3138cdbd3786ae63",
    ),
    "examples/quickstart": (
        "752f7fb213a819a95fd6d379fdb8043eff2a54a47bffc8e39bf753413b91474c",
        "395ca6bcafae157a11b1bd7f063b5d77c5f050908251f7ba9abe75bdb162fcc2",
    ),
    "services/freshet/demo/site": (
        "c84fa74426e8803cb0a9f824447c5bb533fdd29e0964b84613223b4772ede069",
        "9ce4c551c01c3d1ece900f831fab86ac0f9ec53455e56e755b1522b268805cfa",
    ),
    "tests/system/ledger": (
        "1a181453e8709f04378318c47a5b93c3c2a8bb4a3e05621370a3e445ee780720",
        "039bd4f2ca088cbd7c9dd051c76aa35f7f7df1ff2e7eb0d24bd11f8af73fcb31",
    ),
}


EDITED = {  # lines of today, and as that release had them
    "services/freshet/demo/site": {
        "[features]\n": 'crosses = { scalar_optimizer = { name = "adagrad", lr = 0.6 } }\n[features]\n',
        "[train]\n": 'experts = ["wide", "cross", "fm"]\n[train]\n',
    }
}

DEFAULTS = {  # of the last release without the key `defaults`
    "Explore.policy": "none",
    "Explore.share": 0.0,
    "Feature.field": None,
    "Feature.table": None,
    "Feature.max": None,
    "Feature.pool": None,
    "Feature.dense": (),
    "Feature.missing": "zero",
    "Feature.buckets": (),
    "Feature.time": None,
    "Feature.serve_as": None,
    "Files.delimiter": ",",
    "Files.columns": (),
    "Files.encoding": "utf-8",
    "Files.quotes": True,
    "Files.decimal": ".",
    "Files.list_separator": None,
    "Files.nulls": ("NA", "NaN", "nan", "null"),
    "Files.text_nulls": (),
    "Gate.ne_worse": 0.01,
    "Gate.calibration": (0.9, 1.1),
    "Gate.samples": 2000,
    "Gate.floor": 100,
    "Join.base": "served",
    "Join.require": None,
    "Join.grace": 30000,
    "Join.emit": "early",
    "Join.negatives": 1.0,
    "Join.max_ahead": 60000,
    "Label.value": None,
    "Label.loss": "logloss",
    "Label.bounds": None,
    "Label.window": 120000,
    "Label.given": None,
    "Model.kind": "hedge",
    "Model.mix": "hedge",
    "Model.experts": ("wide", "fm", "deep"),
    "Model.crosses": (),
    "Model.deep": (256, 128),
    "Model.seed": 0,
    "Model.hedge_discount": 0.999,
    "Model.dense_lr": 0.001,
    "Model.dense_warmup_steps": 100,
    "Model.bias_lr": 0.5,
    "Retention.events": 604800000,
    "Retention.rows": 86400000,
    "Retention.measures": 604800000,
    "Serve.score": "",
    "Serve.unknown": "zeros",
    "Serve.log_served": True,
    "Spec.partitions": 8,
    "Spec.buckets": 1024,
    "Stream.format": "avro",
    "Stream.schema": None,
    "Stream.explode": None,
    "Stream.id": None,
    "Table.dim": 16,
    "Table.init": 0.01,
    "Table.precision": "fp32",
    "Table.ttl": 2592000000,
    "Table.admission": 1,
    "Table.max_rows": None,
    "Train.batch.rows": 256,
    "Train.batch.wait": 20,
    "Train.batch.behind": None,
    "Train.staleness_rows": 512,
    "Train.mode": "hybrid",
    "Train.lanes": None,
    "Train.precision": "fp32",
    "Train.version_interval": 5000,
    "Train.keep_versions": 10,
    "Train.flush_interval": 2000,
    "Train.publish_interval": 50,
    "Train.publish_codec": "fp32",
    "Train.segments": (),
    "Train.measure_window": 60000,
}
"""`Train.batch.behind` was `batch.rows`, which is what a trainer takes without it."""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = load_settings({}, run_folder=tmp_path / "run")
    settings.common.run.create()
    return settings


def former(path: Path) -> Spec:
    """The spec file with `defaults = 1` written into it."""
    return parse_spec(f"defaults = 1\n{path.read_text()}", folder=str(path.parent))


def hashes() -> tuple[SpecHash, SpecHash]:
    """The quickstart's hash, and the one that an earlier release gave it."""
    spec, before = load_spec(QUICKSTART), former(QUICKSTART)
    return identity_hash(spec, load_schemas(spec)), identity_hash(before, load_schemas(before))


@pytest.mark.parametrize("folder", HASHES)
def test_with_the_former_defaults_a_spec_keeps_its_hash(folder: str) -> None:
    text = (ROOT / folder / "freshet.toml").read_text()
    for today, before in EDITED.get(folder, {}).items():
        assert text.count(today) == 1
        text = text.replace(today, before)
    spec = parse_spec(f"defaults = 1\n{text}", folder=str(ROOT / folder))
    own, with_schemas = identity_hash(spec), identity_hash(spec, load_schemas(spec))

    assert (own, with_schemas) == HASHES[folder]


def test_the_first_generation_has_the_defaults_that_it_had() -> None:
    nouns = [c for c in vars(model).values() if isinstance(c, type) and is_dataclass(c)]
    options = {f"{c.__name__}.{key_of(o)}": o for c in nouns for o in options_of(c)}

    assert {key: default_of(options[key], 1) for key in DEFAULTS} == DEFAULTS
    assert former(QUICKSTART).train.batch_rows == 256
    assert former(QUICKSTART).train.behind_rows(native_loop=True) == 256
    assert former(QUICKSTART).train.behind_rows(native_loop=False) == 256


@pytest.mark.parametrize("folder", HASHES)
def test_the_defaults_of_today_are_another_identity(folder: str) -> None:
    path = ROOT / folder / "freshet.toml"
    spec = load_spec(path)

    own, before = identity_hash(spec), identity_hash(former(path))

    assert spec.defaults == 2
    assert own != before
    assert own.others == {before: 1}
    assert before.others == {own: 2}
    assert with_defaults(spec, 1) == former(path)


def test_a_lane_count_changes_both_hashes_alike() -> None:
    spec = replace(load_spec(QUICKSTART), partitions=2)

    assert identity_hash(spec).others == {identity_hash(replace(former(QUICKSTART), partitions=2)): 1}


def test_a_generation_that_is_not_known_is_refused() -> None:
    for value in ("3", "0", '"1"', "true"):
        with pytest.raises(ConfigError, match=r"defaults = .*\n  expected an integer from 1 to 2"):
            parse_spec(f"defaults = {value}\n{QUICKSTART.read_text()}")


def _identity(spec_hash: str) -> StoreIdentity:
    return StoreIdentity("quickstart", spec_hash, 1, {}, {}, "log")


def _write_rows(url: str, spec_hash: str) -> None:
    rows = open_rowstore(url)
    rows.create(_identity(spec_hash), {Bucket(0): BucketMeta(Fence(0), 0, 0, {}, 0, TimeMs(0))})
    rows.close()


def _row_store(own: str, before: str, settings: Settings) -> None:
    check_identity("rows", _identity(own), _identity(before))


def _versions(before: str, settings: Settings) -> Any:
    store = open_url(settings.common.versions_url)
    weights = {"w": np.zeros(1, np.float32)}
    store.put(Manifest(0, "quickstart", before, 0, 0, {}, "log", 0, {}, 0, ""), weights)
    store.judge(0, "promoted", "the initial weights")
    return store


def _restart(own: str, before: str, settings: Settings) -> None:
    restart_point(_versions(before, settings), own, "log")


def _ranks(own: str, before: str, settings: Settings) -> None:
    ledger, progress = SimpleNamespace(applied={}), SimpleNamespace(steps=0)
    state = DenseState(*cast(Any, (None, ledger, None, None, progress, own)))
    other = orjson.dumps({"step": 0, "spec": before, "vector": [], "synced": True})  # it trains already
    state.sync(cast(Any, SimpleNamespace(exchange=lambda mine: [mine, other], rank=0, size=2)))


class _OneTry(threading.Event):
    """Ends a service where it would wait for its next try."""

    def wait(self, timeout: float | None = None) -> bool:
        self.set()
        return True


def _served_rows(own: str, before: str, settings: Settings) -> None:
    _write_rows(settings.common.rows_url, before)
    rows, log = open_rowstore(settings.common.rows_url), open_eventlog(settings.common.log_url)
    follower = RowFollower(log, rows, "t", cast(Any, None), spec_hash=own, wait_s=0.01)
    try:
        follower.run(_OneTry())
    finally:
        rows.close()
        log.close()
    raise Mismatch(follower.state.reason)


def _served_version(own: str, before: str, settings: Settings) -> None:
    follower = VersionFollower(
        _versions(before, settings),
        cast(Any, None),
        CollectorRegistry(),
        model="quickstart",
        spec_hash=own,
        poll_s=1.0,
    )
    follower.poll()
    raise Mismatch(follower.state.reason)


def _prepared(own: str, before: str, settings: Settings) -> None:
    _write_rows(settings.common.rows_url, before)
    prepare.check_rows(load_spec(QUICKSTART), settings.common.rows_url)


def _started(own: str, before: str, settings: Settings) -> None:
    _write_rows(settings.common.rows_url, before)
    spec = load_spec(QUICKSTART)
    refuse_another_model(spec, load_schemas(spec), settings)


PLACES = [_row_store, _restart, _ranks, _served_rows, _served_version, _prepared, _started]


@pytest.mark.parametrize("place", PLACES)
def test_every_comparison_says_how_to_go_on(
    place: Callable[[str, str, Settings], None], settings: Settings
) -> None:
    own, before = hashes()

    with pytest.raises(Mismatch) as raised:
        place(own, before, settings)

    assert " ".join(WHAT_TO_DO.split()) in " ".join(str(raised.value).split())


@pytest.mark.parametrize("place", PLACES)
def test_other_spec_gets_no_hint_about_defaults(
    place: Callable[[str, str, Settings], None], settings: Settings
) -> None:
    with pytest.raises(Mismatch) as raised:
        place(hashes()[0], "0" * 64, settings)

    assert "defaults" not in str(raised.value)


def test_the_whole_message_of_a_start() -> None:
    own, before = hashes()

    with pytest.raises(Mismatch) as raised:
        check_identity("sqlite:rows", _identity(own), _identity(before))

    assert str(raised.value) == (
        "sqlite:rows: the row store belongs to another model, spec or log:\n"
        f"  spec_hash: expected '{own}', found '{before}'\n{WHAT_TO_DO}"
    )
    assert explain_defaults(before, own) == (
        "  The hash found is the hash of this spec with `defaults = 2`; the spec now has `defaults = 1`.\n"
        "  To continue with that model unchanged, put `defaults = 2` at the top of the spec.\n"
        "  To start a new model with `defaults = 1`, use another name, or a new store."
    )


def test_a_kept_spec_says_its_generation(settings: Settings) -> None:
    for spec in (load_spec(QUICKSTART), former(QUICKSTART)):
        keep_spec(spec, settings)
        kept = load_kept(kept_spec(settings))

        assert f"\ndefaults = {spec.defaults}\n" in kept_spec(settings).read_text()
        assert identity_hash(kept, load_schemas(kept)) == identity_hash(spec, load_schemas(spec))


def test_a_kept_spec_without_a_generation_means_the_first(settings: Settings) -> None:
    keep_spec(former(QUICKSTART), settings)
    path = kept_spec(settings)
    path.write_text(path.read_text().replace("defaults = 1\n", ""))

    result = CliRunner().invoke(check, [str(QUICKSTART), "--against", str(path)])

    assert load_kept(path).defaults == 1
    assert result.exit_code == 3
    assert result.output.startswith("defaults: 1 -> 2 (identity): needs a new model")
