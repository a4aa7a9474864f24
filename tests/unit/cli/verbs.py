"""The command line, called in the test's process."""

from click.testing import CliRunner

from freshet.cli import cli


def run(*arguments, catch=False):
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=catch)
