from pathlib import Path

import pytest

from freshet.config.options import duration_text, key_of, options_of
from freshet.errors import ConfigError
from freshet.rows.redis.connection import RedisOptions, parse_url


def test_a_url_names_servers_store_and_options(tmp_path: Path):
    secret = tmp_path / "password"
    secret.write_text("s3cret\n")
    url = parse_url(
        f"rediss://a:1,[::1]:2,b/news?user=f&password_file={secret}&timeout=500ms&patience=4s&min_replicas=1&wait=50ms"
    )
    assert url.servers == (("a", 1), ("::1", 2), ("b", 6379))
    assert (url.name, url.tls, url.password) == ("news", True, "s3cret")
    assert url.options == RedisOptions(
        user="f", password_file=str(secret), timeout_ms=500, patience_ms=4000, min_replicas=1, wait_ms=50
    )
    assert "s3cret" not in repr(url) + str(url)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://a:1", "redis://HOST:PORT,HOST:PORT/NAME"),
        ("redis://a:1/", "NAME begins all keys"),
        ("redis://a:1/x{y}", "name.*letters"),
        ("redis://a:0/m", "HOST:PORT"),
        ("redis://a:b/m", "HOST:PORT"),
        ("redis:///m", "HOST:PORT"),
        ("redis://a:1,/m", "HOST:PORT"),
        ("redis://a:1/m?timout=1s", "did you mean.*timeout"),
        ("redis://a:1/m?timeout=1", "a duration is a number and its unit"),
        ("redis://a:1/m?min_replicas=many", "min_replicas.*an integer from 0"),
        ("redis://a:1/m?wait=1s&wait=2s", "wait twice"),
        ("redis://a:1/m?ca_file=/x", "rediss:"),
        ("redis://a:1/m?password_file=/none/there", "cannot be read"),
    ],
)
def test_a_url_that_cannot_be_is_refused_and_says_why(url: str, told: str):
    with pytest.raises(ConfigError, match=rf"(?s){told}"):
        parse_url(url)


@pytest.mark.parametrize("url", ["redis://u:hunter2@a:1/m", "redis://a:1/m?password=hunter2"])
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str):
    with pytest.raises(ConfigError, match="password_file") as refused:
        parse_url(url)
    assert "hunter2" not in str(refused.value)


def test_an_empty_password_file_is_refused(tmp_path: Path):
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="it is empty"):
        parse_url(f"redis://a:1/m?password_file={tmp_path}/empty")


def test_the_page_has_every_option_with_its_default():
    page = (Path(__file__).parents[4] / "docs" / "redis.md").read_text()
    for field in options_of(RedisOptions):
        line = next(
            line for line in page.splitlines() if line.startswith("|") and f"`{key_of(field)}`" in line
        )
        if isinstance(field.default, int):
            shown = duration_text(field.default) if field.name.endswith("_ms") else str(field.default)
            assert f"| `{shown}` |" in line
