import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import freshet
from freshet.cli.options import DEFAULT_FOLDER
from freshet.config.settings import RunFolder, Settings, load_settings, variables
from freshet.errors import ConfigError


def message(environment: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(environment)
    return str(caught.value)


def test_defaults_fit_one_machine() -> None:
    settings = load_settings({}, run_folder="/data/run")

    assert settings.gateway.port == 7000
    assert settings.inference.port == 7001
    assert settings.console.port == 7002
    assert settings.joiner.admin_port == 7010
    assert settings.trainer.admin_port == 7011
    assert settings.common.bind_address == "127.0.0.1"
    assert settings.common.log_url == "sqlite:/data/run/log"
    assert settings.common.rows_url == "sqlite:/data/run/rows/rows.sqlite"
    assert settings.common.versions_url == "file:/data/run/versions"


def test_variable_overrides_a_default() -> None:
    settings = load_settings(
        {
            "FRESHET_GATEWAY_PORT": "7100",
            "FRESHET_COMMON_LOG_URL": "kafka:broker:9092",
            "FRESHET_COMMON_DRAIN": "3s",
            "FRESHET_INFERENCE_VERSION_POLL": "500ms",
            "PATH": "/bin",
            "FRESHET_TEST_SEED": "7",
        }
    )

    assert settings.gateway.port == 7100
    assert settings.common.log_url == "kafka:broker:9092"
    assert settings.common.drain_ms == 3_000
    assert settings.inference.version_poll_ms == 500


def test_every_setting_is_read() -> None:
    package = Path(freshet.__file__).parent
    files = [p for p in package.rglob("*.py") if not p.is_relative_to(package / "config" / "settings")]
    used: set[tuple[str, str]] = set()
    for code in (path.read_text() for path in files):
        of_settings = set(re.findall(r"settings\.(\w+)", code))
        used |= set(product(of_settings, re.findall(r"\.(\w+)", code)))
        passed_on = ("common", "gateway", "inference", "console")  # as objects named settings or common
        used |= set(product(passed_on, of_settings | set(re.findall(r"common\.(\w+)", code))))
    stored = {"log_url", "rows_url", "versions_url", "run_folder"}  # `Common.run` and the stores' URLs

    unread = {(v.service, v.option.name) for v in variables() if v.option.name not in stored} - used
    assert unread == set()


def test_the_command_line_has_the_same_default_folder() -> None:
    assert load_settings({}).common.run_folder == DEFAULT_FOLDER


def test_an_unknown_variable_is_an_error_with_the_nearest_name() -> None:
    assert message({"FRESHET_GATEWAY_PROT": "7100"}) == (
        "environment: FRESHET_GATEWAY_PROT = '7100'\n"
        "  expected a setting that exists, FRESHET_<SERVICE>_<OPTION>\n"
        '  did you mean "FRESHET_GATEWAY_PORT"?'
    )


@pytest.mark.parametrize("text", ["70000", "-1", "seven", ""])
def test_invalid_port_is_refused_with_the_allowed_range(text: str) -> None:
    shown = int(text) if text.lstrip("-").isdigit() else text
    assert message({"FRESHET_GATEWAY_PORT": text}) == (
        f"environment: FRESHET_GATEWAY_PORT = {shown!r}\n"
        "  expected an integer from 0 to 65535\n"
        "  port: HTTP; 0 takes a free one"
    )


def test_a_duration_without_a_unit_is_refused() -> None:
    assert "a duration from 0ms to 1h" in message({"FRESHET_COMMON_DRAIN": "10"})


def test_run_folder_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run").create()

    assert sorted(p.name for p in run.path.iterdir()) == ["log", "logs", "rows", "state", "versions"]
    assert run.log.stat().st_mode & 0o077 == 0
    assert run.create() == run


def test_run_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"cannot be created[\s\S]*--folder"):
        RunFolder(tmp_path / "file" / "run").create()


@given(
    st.dictionaries(
        st.sampled_from([v.name for v in variables()]), st.text(st.characters(codec="utf-8"), max_size=20)
    )
)
def test_any_text_is_read_or_refused_with_a_config_error(environment: dict[str, str]) -> None:
    try:
        settings = load_settings(environment)
    except ConfigError:
        return
    assert isinstance(settings, Settings)
