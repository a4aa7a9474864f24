"""The reference of the settings, written from the options themselves.

`python -m freshet.settings.reference > docs/settings.md` writes it anew; a test says when that file is stale.
"""

from __future__ import annotations

from collections.abc import Iterator

from freshet.options.reference import default_text, grid
from freshet.settings.parse import SERVICES, variables

__all__ = ["reference"]

INTRO = """\
# Settings: where things run

<!-- Written by `python -m freshet.settings.reference`; edit services/freshet/settings/model.py instead. -->

What a model is stands in [its spec](feature-spec.md); where and within which bounds it runs stands here.
Settings are environment variables, read once at the start of a service. An unknown name that starts with
`FRESHET_` is an error.
"""


def reference() -> str:
    """The whole page."""
    return "\n".join(_page())


def _page() -> Iterator[str]:
    yield INTRO
    for service, cls in SERVICES.items():
        summary = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
        yield f"## {service}\n\n{summary}\n"
        rows = [
            (
                f"`{v.name}`",
                v.option.metadata["form"].expected,
                default_text(v.option),
                v.option.metadata["doc"],
            )
            for v in variables()
            if v.service == service
        ]
        yield from grid(rows, ("variable", "allowed", "default", "meaning"))
        yield ""


if __name__ == "__main__":
    print(reference(), end="")
