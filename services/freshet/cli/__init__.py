"""The command `freshet`, a module per verb. A verb is imported when it is called, so that `--help` is
fast."""

from __future__ import annotations

import errno
import importlib
import sys
from difflib import get_close_matches

import click

from freshet.errors import FreshetError
from freshet.extras import EXTRAS, how_to_install
from freshet.release import RELEASE
from freshet.terminal import discard, mend_streams

__all__ = ["EXITS", "main"]

EXITS = {
    0: "done; for `up`, `demo`, `run` and `simulate`: stopped by request",
    1: "an error of freshet or of the system, printed as `Family: finding, place, remedy`",
    2: "the command line is invalid",
    3: "`freshet check --against`: an edit needs a new model",
    129: "ended before it was done because its terminal was closed (SIGHUP)",
    130: "interrupted by Ctrl-C before it was done",
    143: "ended by SIGTERM before it was done",
}
"""Exit status -> its meaning."""

VERBS = {
    "demo": "Run every service on a small news site with simulated readers, and watch a model learn.",
    "up": "Run every service of a spec on this machine and keep them running.",
    "run": "Run one service in the foreground.",
    "prepare": "Create the topics of a spec, and check its stores.",
    "status": "Show the services of a run, their progress, and the freshness of the served model.",
    "simulate": "Simulate readers of the demo's news site.",
    "load": "Measure how a running system answers at a stated rate of events and rankings.",
    "replay": "Send recorded events through the gateway, or straight into the log.",
    "backtest": "Learn from files of ready samples, once, in order; print the measures.",
    "rank": "Rank candidates with the inference server.",
    "peek": "Print records of a topic in readable form.",
    "token": "Create, list and drop the tokens of clients.",
    "version": "List, show, promote and roll back dense versions.",
    "rows": "Find damaged rows in the row store, and repair it without them.",
    "late": "Join late events again, after clocks were wrong.",
    "audit": "List promotions, rollbacks, and tokens created or dropped.",
    "check": "Explain a spec, or list the edits to a running model that need a new one.",
    "init": "Write a commented spec for your Avro schemas.",
}


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"freshet.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS:
            near = get_close_matches(args[0], VERBS, 1)
            hint = f" Did you mean `freshet {near[0]}`?" if near else ""
            raise click.UsageError(f"no command {args[0]!r}.{hint} `freshet --help` lists them.", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(RELEASE, prog_name="freshet")
def cli() -> None:
    """Streaming online learning: events in, fresher predictions out."""


def main() -> None:
    """Run the command; print errors of freshet and of the system without a traceback, and exit with 1."""
    mend_streams()
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except FreshetError as error:
        click.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(1)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRAS:
            raise  # no extra provides it: a defect of freshet
        click.echo(_missing_package(name), err=True)
        sys.exit(1)
    except OSError as error:
        click.echo(_system_error(error), err=True)
        try:
            sys.stdout.flush()
        except OSError:  # standard output itself failed
            discard(sys.stdout)
        sys.exit(1)


def _missing_package(name: str) -> str:
    """Return the error text for a package of an extra that is not installed."""
    return (
        f"ConfigError: the package {name} is not installed\n"
        f'  expected the packages of freshet\'s extra "{EXTRAS[name]}"\n'
        f"  {how_to_install(name)}"
    )


_HINTS = {
    errno.ENOENT: "is the path right, and does the working directory still exist?",
    errno.EISDIR: "a file is expected there, not a folder",
    errno.ENOSPC: "the disk is full: free some space and do it again",
    errno.EDQUOT: "the quota of this user is used up: free some space and do it again",
    errno.EFBIG: "no file may grow any more: see `ulimit -f`",
    errno.EACCES: "may this user read and write there?",
    errno.EPERM: "may this user read and write there?",
    errno.EROFS: "it is mounted read-only: take another folder",
    errno.EMFILE: "too many files are open: see `ulimit -n`",
}


def _system_error(error: OSError) -> str:
    """Return the text of a system error, with the path and a hint."""
    where = f"{error.filename}: " if error.filename else ""
    hint = _HINTS.get(error.errno or 0, "")
    return f"{type(error).__name__}: {where}{error.strerror or error}" + (f"\n  {hint}" if hint else "")
