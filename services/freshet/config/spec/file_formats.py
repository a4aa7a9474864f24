"""Nouns of a spec, fourth part: how files of the user's own are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from freshet.config.options import Boolean, Choice, ListOf, Text, option
from freshet.config.spec.forms import PATH

__all__ = ["Files"]


ENCODINGS = (
    "utf-8", "utf-16", "latin-1", "iso-8859-2", "iso-8859-9", "iso-8859-15", "cp1250", "cp1251", "cp1252",
    "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp437", "cp850", "koi8-r", "koi8-u", "mac-roman",
    "shift_jis", "cp932", "euc-jp", "gb18030", "big5", "euc-kr",
)  # fmt: skip
"""Encodings of texts, as Python's codecs call them."""

WORD = Text("a word, at most 40 characters", r"[^\r\n]{1,40}", longest=40)
SEPARATOR = Text(
    "one to four characters, no letters, digits, quotes or line ends", r"[^\w\r\n\"]{1,4}", longest=4
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """How csv files of samples and events are written. Parquet and Arrow files say so themselves."""

    delimiter: str = option(
        "deployment",
        'what stands between two cells; "\\t" for tabs, "::" for MovieLens',
        SEPARATOR,
        default=",",
    )
    columns: tuple[str, ...] = option(
        "deployment",
        "names of the columns of a file that has no header line, in their order",
        ListOf(PATH, 0, 4_096),
        default=(),
    )
    encoding: str = option("deployment", "encoding of the text", Choice(ENCODINGS), default="utf-8")
    quotes: bool = option(
        "deployment",
        'whether a cell may stand in quotes, "" for a quote in it; false: quotes are characters like others',
        Boolean(),
        default=True,
    )
    decimal: Literal[".", ","] = option(
        "deployment", "the mark before a number's fraction", Choice((".", ",")), default="."
    )
    list_separator: str | None = option(
        "deployment",
        "what stands between the values of a list in one cell; without it a cell holds no list",
        SEPARATOR,
        default=None,
    )
    nulls: tuple[str, ...] = option(
        "deployment",
        "cells that are no value in columns of numbers, truths and times, as an empty cell is without this",
        ListOf(WORD, 0, 64),
        default=("NA", "NaN", "nan", "null"),
    )
    text_nulls: tuple[str, ...] = option(
        "deployment",
        "cells that are no value in columns of text, as an empty cell without quotes is without this",
        ListOf(WORD, 0, 64),
        default=(),
    )
