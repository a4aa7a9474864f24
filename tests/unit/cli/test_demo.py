import pytest

from freshet.apps.demo import DemoOptions, refuse_other_contents
from freshet.config.settings import RunFolder
from freshet.demo import write_spec
from freshet.demo.start_time import STATE_FILE, RunStart, save_start
from freshet.errors import ConfigError
from tests.unit.cli.verbs import run


@pytest.fixture
def played(tmp_path):
    """A folder whose readers began with seed 3 and a drift after 60 s."""
    folder = RunFolder(tmp_path / "played").create()
    (folder.path / "log" / "catalog.sqlite").write_bytes(b"")
    (folder.path / "freshet.toml").touch()
    save_start(folder.state / STATE_FILE, RunStart(3, (60.0,), None), 1_000)
    return folder.path


def test_demo_without_options_has_the_simulators_defaults():
    words = DemoOptions(1_000, None, ()).simulator_arguments(None)

    assert " ".join(words) == "--rate 1000 --seed 7 --drift-at 150s --drift-every 5m"


def test_drift_of_the_command_line_is_the_only_one():
    words = DemoOptions(10, 1, ("30s", "1m")).simulator_arguments(None)

    assert " ".join(words) == "--rate 10 --seed 1 --drift-at 30s --drift-at 1m --drift-every none"


def test_restarted_demo_keeps_the_readers_of_its_folder():
    words = DemoOptions(10, None, ()).simulator_arguments(RunStart(3, (60.0,), 300.0))

    assert " ".join(words) == "--rate 10 --seed 3 --drift-at 60000ms --drift-every 300000ms"


@pytest.mark.parametrize(("option", "value"), [("--seed", "4"), ("--drift-at", "90s")])
def test_other_readers_than_the_folders_are_refused(played, option, value):
    with pytest.raises(ConfigError, match=f"{option} = [\\s\\S]*delete the folder"):
        run("demo", played, option, value)


def test_folder_with_other_contents_is_refused(tmp_path):
    (tmp_path / "letter.txt").write_text("mine")

    with pytest.raises(ConfigError, match=r"it holds letter\.txt; take another: freshet demo"):
        run("demo", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_folder_of_a_killed_first_start_is_accepted(tmp_path):
    (tmp_path / ".freshet.toml.new").touch()

    refuse_other_contents(tmp_path)

    assert write_spec(tmp_path).exists()
    assert {path.name for path in tmp_path.iterdir()} == {"freshet.toml", "pages.avsc", "actions.avsc"}


def test_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")

    with pytest.raises(ConfigError, match="found a file"):
        run("demo", tmp_path / "file")


def test_a_changed_spec_is_not_run_as_the_demo(tmp_path):
    (tmp_path / "freshet.toml").write_text("name = 'mine'")

    with pytest.raises(ConfigError, match="a changed spec is run by `freshet up`"):
        run("demo", tmp_path)
