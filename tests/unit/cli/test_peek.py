"""Records as `freshet peek` shows them."""

from freshet.cli.peek import _text


def test_what_a_client_sent_tells_a_terminal_nothing():
    line = {"partition": 0, "offset": 7, "key": "\x1b[31mred\x07", "value": {"text": "\x9b2J é\u202e"}}

    assert _text(line) == r'0:7 \x1b[31mred\x07 {"text":"\x9b2J é\u202e"}'
