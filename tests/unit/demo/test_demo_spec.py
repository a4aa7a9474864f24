"""The demo's spec and the stored start of a simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from freshet.config.spec import load_spec
from freshet.config.spec.schemas import load_schemas
from freshet.demo import write_spec
from freshet.demo.news_site import LONGEST_CLICK_S, LONGEST_PURCHASE_S
from freshet.demo.start_time import RunStart, read_start, save_start
from freshet.errors import ConfigError


def test_the_spec_is_written_with_its_schemas_and_fits_them(tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path / "demo"))

    assert load_schemas(spec).served.name.endswith("Page")
    assert [label.name for label in spec.labels] == ["click", "purchase"]
    assert spec.serve.explore.share == 0.1


def test_label_windows_include_longest_delays(tmp_path: Path) -> None:
    click, purchase = load_spec(write_spec(tmp_path)).labels

    assert click.window_ms >= 1_000 * LONGEST_CLICK_S
    assert purchase.window_ms >= 1_000 * (LONGEST_CLICK_S + LONGEST_PURCHASE_S)


def test_identical_spec_is_kept(tmp_path: Path) -> None:
    first = write_spec(tmp_path)
    written = first.stat().st_mtime_ns

    assert write_spec(tmp_path) == first
    assert first.stat().st_mtime_ns == written


def test_changed_spec_is_not_overwritten(tmp_path: Path) -> None:
    file = write_spec(tmp_path)
    file.write_text("# mine now\n")

    with pytest.raises(ConfigError, match="use another folder"):
        write_spec(tmp_path)
    assert file.read_text() == "# mine now\n"


def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="a folder that this user may write to"):
        write_spec(tmp_path / "file" / "demo")


def test_simulation_continues_with_its_start(tmp_path: Path) -> None:
    file, wanted = tmp_path / "simulator.json", RunStart(7, (150.0,), 300.0)
    assert read_start(file, wanted) is None

    stored = save_start(file, wanted, 1_700_000_000_000)

    assert read_start(file, wanted) == stored
    assert stored.began_ms == 1_700_000_000_000


@pytest.mark.parametrize(
    "other", [RunStart(8, (150.0,), 300.0), RunStart(7, (), 300.0), RunStart(7, (150.0,), None)]
)
def test_other_parameters_are_refused(tmp_path: Path, other: RunStart) -> None:
    file = tmp_path / "simulator.json"
    save_start(file, RunStart(7, (150.0,), 300.0), 1_700_000_000_000)

    with pytest.raises(ConfigError, match="start over in another folder"):
        read_start(file, other)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"seed": 7}', b'{"seed": null}'])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "simulator.json"
    file.write_bytes(content)

    with pytest.raises(ConfigError, match=r"simulator\.json"):
        read_start(file, RunStart(7, (), None))
