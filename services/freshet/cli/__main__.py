"""`python -m freshet.cli`: the command without an installed script."""

from freshet.cli import main

main()
