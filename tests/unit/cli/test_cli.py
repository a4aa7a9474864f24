import csv
import gzip
import json
import random
import sys
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet
import pytest

from freshet.cli import VERBS, main
from freshet.errors import BadInput, ConfigError
from freshet.process.memory import machine_memory_bytes
from tests.unit.cli.verbs import run

EXAMPLES = Path(__file__).parents[3] / "examples"
QUICKSTART = EXAMPLES / "quickstart" / "freshet.toml"

SPEC = """
name = "toy"

[events]
served = { key = ["user"], time = "ts:iso" }
action = { key = ["user"], time = "ts:iso" }

[labels]
click = { on = "action.click == 1" }

[tables]
all = { dim = 4 }

[features]
user  = { field = "user", table = "all" }
item  = { field = "item.id", table = "all" }
price = { field = "item.price", dense = ["log1p", "standard"], missing = "flag" }
"""


@pytest.fixture
def spec_file(tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def samples(tmp_path):
    """Two thousand rows in which a user's parity and an item's decide the click."""
    rng = random.Random(1)
    path = tmp_path / "toy.csv.gz"
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ts", "user", "item.id", "item.price", "request", "click"])
        for n in range(2000):
            user, item = rng.randrange(20), rng.randrange(20)
            price = "" if n % 7 == 0 else f"{rng.random():.3f}"
            click = int(rng.random() < (0.8 if (user + item) % 2 else 0.1))
            writer.writerow(
                [f"2026-01-01T00:{n // 60 % 60:02d}:{n % 60:02d}Z", f"u{user}", item, price, n // 5, click]
            )
    return path


def test_help_lists_every_verb():
    output = run("--help").output

    assert all(verb in output for verb in VERBS)


def test_unknown_verb_is_refused_with_the_nearest_one():
    result = run("replya", catch=True)

    assert result.exit_code == 2
    assert "Did you mean `freshet replay`?" in result.output


def test_every_verb_has_help():
    for verb in VERBS:
        assert run(verb, "--help").exit_code == 0


def test_check_explains_a_spec_and_json_is_one_object():
    report = json.loads(run("check", QUICKSTART, "--json").stdout)

    assert report["name"] == "news"
    assert len(report["identity"]) == 64


def test_check_states_how_much_memory_rows_may_take(monkeypatch):
    monkeypatch.delenv("FRESHET_TRAINER_MEMORY_BYTES", raising=False)
    by_default = json.loads(run("check", QUICKSTART, "--json").stdout)["rows_memory"]
    said = run("check", QUICKSTART).output

    assert by_default["bytes"] == machine_memory_bytes() // 4
    assert set(by_default["max_rows"]) == {"reader", "article", "small", "crosses"}
    assert f"rows may take {by_default['bytes']:,} bytes, a quarter of" in said
    assert f"{by_default['max_rows']['reader']:,} rows of reader" in said
    assert "FRESHET_TRAINER_MEMORY_BYTES" in said

    monkeypatch.setenv("FRESHET_TRAINER_MEMORY_BYTES", "64000000")
    assert (
        "rows may take 64,000,000 bytes, as FRESHET_TRAINER_MEMORY_BYTES says"
        in run("check", QUICKSTART).output
    )

    monkeypatch.setenv("FRESHET_TRAINER_BATCHES", "embedders")
    assert "FRESHET_PARAMSERVER_MEMORY_BYTES" in run("check", QUICKSTART).output

    monkeypatch.setenv("FRESHET_PARAMSERVER_MEMORY_BYTES", "100000000")
    assert "has so many is full, and training waits" in run("check", QUICKSTART).output

    monkeypatch.setenv("FRESHET_PARAMSERVER_EVICT_BYTES", "64000000")
    evicting = json.loads(run("check", QUICKSTART, "--json").stdout)["rows_memory"]
    assert (evicting["bytes"], evicting["evicts"]) == (64_000_000, True)
    assert set(evicting["max_rows"]) == {"reader", "article", "small", "crosses"}
    assert "rows of a shard may take 64,000,000 bytes, as FRESHET_PARAMSERVER_EVICT_BYTES says" in (
        run("check", QUICKSTART).output
    )

    monkeypatch.setenv("FRESHET_PARAMSERVER_EVICT_BYTES", "90000000")
    with pytest.raises(ConfigError, match="EVICT_BYTES = 90000000\n  expected at most 80000000"):
        run("check", QUICKSTART)


def test_check_states_where_rows_of_a_server_are(monkeypatch, tmp_path):
    monkeypatch.setenv("FRESHET_INFERENCE_MEMORY_BYTES", "64000000")
    with pytest.raises(ConfigError, match="FRESHET_INFERENCE_SSD_FOLDER"):
        run("check", QUICKSTART)
    monkeypatch.setenv("FRESHET_INFERENCE_SSD_FOLDER", str(tmp_path))
    assert f"may take 64,000,000 bytes; beyond that they are in files in {tmp_path}" in (
        run("check", QUICKSTART).output
    )


def test_check_against_ends_with_3_if_an_edit_needs_a_new_model(tmp_path):
    for schema in ("impressions.avsc", "actions.avsc"):
        (tmp_path / schema).write_text((EXAMPLES / "quickstart" / schema).read_text())
    edited = tmp_path / "freshet.toml"
    edited.write_text(QUICKSTART.read_text().replace("{ dim = 16 }", "{ dim = 8 }"))

    result = run("check", edited, "--against", QUICKSTART)

    assert result.exit_code == 3
    assert "tables.article.dim: 16 -> 8 (identity): needs a new model" in result.output


def test_init_writes_a_valid_spec_and_does_not_overwrite(tmp_path):
    schemas = []
    for name in ("impressions.avsc", "actions.avsc"):
        path = tmp_path / name
        path.write_text((EXAMPLES / "quickstart" / name).read_text())
        schemas += ["--schema", path]
    out = tmp_path / "freshet.toml"

    assert run("init", *schemas, "--out", out).exit_code == 0
    assert run("check", out).exit_code == 0
    assert out.read_text().startswith("#:schema ./freshet.schema.json\n")  # for editors
    assert (tmp_path / "freshet.schema.json").read_text() == run("check", "--json-schema").stdout
    with pytest.raises(ConfigError, match="--force replaces it"):
        run("init", *schemas, "--out", out)


def test_backtest_learns_and_prints_one_json_object(spec_file, samples):
    result = json.loads(
        run("backtest", spec_file, samples, "--request", "request", "--lanes", 1, "--json").output
    )

    assert result["samples"] == 2000
    assert {"samples_per_s", "auc", "logloss", "ne", "calibration"} <= set(result)
    assert result["auc"] > 0.6


def test_backtest_with_one_lane_is_deterministic(spec_file, samples):
    first, second = (
        json.loads(run("backtest", spec_file, samples, "--lanes", 1, "--json").stdout) for _ in range(2)
    )

    assert first["labels"] == second["labels"]


def test_parquet_and_csv_give_the_same_result(spec_file, samples, tmp_path):
    parquet = tmp_path / "toy.parquet"
    pyarrow.parquet.write_table(pyarrow.csv.read_csv(samples), parquet)

    of_csv, of_parquet = (
        json.loads(run("backtest", spec_file, f, "--lanes", 1, "--json").stdout) for f in (samples, parquet)
    )

    assert of_csv["labels"] == of_parquet["labels"]


def test_a_file_that_is_no_table_is_refused(spec_file, tmp_path):
    path = tmp_path / "wrong.parquet"
    path.write_bytes(b"not parquet")

    with pytest.raises(BadInput, match=r"expected a csv, csv.gz or parquet file"):
        run("backtest", spec_file, path)


def test_kept_backtest_can_be_listed_shown_and_rolled_back(spec_file, samples, tmp_path):
    folder = tmp_path / "run"
    run("backtest", spec_file, samples, "--lanes", 1, "--keep", folder, "--json")

    versions = json.loads(run("version", "list", "--folder", folder, "--json").stdout)
    newest = versions["versions"][-1]["number"]
    shown = json.loads(run("version", "show", newest, "--folder", folder, "--json").stdout)
    topics = run("peek", "--folder", folder).output
    blocks = run("peek", "toy.samples", "--folder", folder, "-n", 1).output
    rolled = run("version", "rollback", 0, "--folder", folder).output
    status = json.loads(run("status", "--folder", folder, "--json").stdout)

    assert shown["applied"] == {"0": versions["versions"][-1]["applied"]["0"]}
    assert "toy.samples" in topics
    assert '"samples"' in blocks
    assert "stable is now version 0" in rolled
    assert "`freshet version promote NUMBER`" in rolled
    assert status["versions"]["aliases"]["stable"] == 0


def test_versions_elsewhere_are_listed_moved_and_counted(spec_file, samples, tmp_path, monkeypatch):
    folder = tmp_path / "kept"
    run("backtest", spec_file, samples, "--keep", folder)
    (folder / "versions").rename(tmp_path / "elsewhere")
    monkeypatch.setenv("FRESHET_COMMON_VERSIONS_URL", f"file:{tmp_path / 'elsewhere'}")

    listed = json.loads(run("version", "list", "--folder", folder, "--json").stdout)["versions"]
    run("version", "rollback", 0, "--folder", folder)
    status = json.loads(run("status", "--folder", folder, "--json").stdout)["versions"]

    assert listed
    assert status["stored"] == len(listed)
    assert status["aliases"]["stable"] == 0


def test_folder_without_a_run_is_refused_with_a_hint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # in a clone where `make demo` ran, the hint names its folder
    with pytest.raises(ConfigError, match=r"is no run folder[\s\S]*`freshet demo` creates an example"):
        run("status", "--folder", tmp_path)


def test_folder_option_overrides_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FRESHET_COMMON_RUN_FOLDER", str(tmp_path / "one"))

    with pytest.raises(ConfigError, match="one does not exist"):
        run("status")
    with pytest.raises(ConfigError, match="two does not exist"):
        run("status", "--folder", tmp_path / "two")


def test_no_run_folder_is_needed_for_external_stores(tmp_path, monkeypatch):
    monkeypatch.setenv("FRESHET_COMMON_VERSIONS_URL", f"file:{tmp_path / 'versions'}")
    with pytest.raises(ConfigError, match="--folder"):
        run("version", "list", "--folder", tmp_path / "none")
    monkeypatch.setenv("FRESHET_COMMON_LOG_URL", f"sqlite:{tmp_path / 'log'}")

    listed = run("version", "list", "--folder", tmp_path / "none", "--json").stdout

    assert json.loads(listed) == {"versions": [], "aliases": {}}


def test_unknown_version_is_refused_with_the_known_ones(spec_file, samples, tmp_path):
    folder = tmp_path / "run"
    run("backtest", spec_file, samples, "--lanes", 1, "--keep", folder, "--json")

    with pytest.raises(ConfigError, match=r"a stored version \(0 to \d+\)"):
        run("version", "show", 999, "--folder", folder)


def _needs_pyarrow(module):
    users = ("recordings.", "features.arrow", "features.cell", "apps.sample_files", "apps.backtest")
    return module.__name__.removeprefix("freshet.").startswith((*users, "apps.native_backtest"))


def test_missing_package_is_named_with_its_extra(spec_file, samples, monkeypatch, capsys):
    for name in [n for n, m in sys.modules.items() if n.startswith("freshet.") and _needs_pyarrow(m)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not there
    monkeypatch.setattr(sys, "argv", ["freshet", "backtest", str(spec_file), str(samples)])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 1
    assert capsys.readouterr().err.endswith(
        "ConfigError: the package pyarrow is not installed\n"
        '  expected the packages of freshet\'s extra "replay"\n'
        '  pip install pyarrow; or in a clone of freshet, pip install ".[replay]"\n'
    )


def test_every_verb_takes_json():
    for verb in VERBS:
        if verb not in ("token", "version", "replay", "rows", "late"):  # groups: their commands take it
            assert "--json" in run(verb, "--help").output
    for command in ("list", "show", "promote", "rollback"):
        assert "--json" in run("version", command, "--help").output
    for command in ("check", "mend"):
        assert "--json" in run("rows", command, "--help").output
    for command in ("set-back", "join"):
        assert "--json" in run("late", command, "--help").output
    for command in ("files", "topics"):
        assert "--json" in run("replay", command, "--help").output
