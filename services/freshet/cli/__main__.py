"""`python -m freshet.cli`: the same command, where no script is installed."""

from freshet.cli import main

main()
