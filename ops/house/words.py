"""Forbidden words: `words.toml` says which, where they are allowed and how to write instead."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ops.house.sources import Text

WORDS_FILE = Path(__file__).with_name("words.toml")
OPENING = "a sentence that begins with its subject"
CODE_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Word:
    """A forbidden word."""

    pattern: str
    expression: re.Pattern[str]  # of the pattern, as whole words
    write: str  # the words to use instead
    allowed: re.Pattern[str] | None  # phrases in which it is right
    files: tuple[str, ...]  # patterns of paths in which it is right


@dataclass(frozen=True, slots=True)
class Finding:
    """A forbidden word in a file."""

    path: str
    line: int
    kind: str  # of the text
    found: str
    write: str

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: {self.kind}: "{self.found}": write {self.write}'


class Vocabulary:
    """All forbidden words. One expression finds their places, so that a file is read once."""

    def __init__(self, words: Sequence[Word], openings: Sequence[str] = ()) -> None:
        self._words = words
        self._any = whole_words("|".join(word.pattern for word in words)) if words else None
        begin = r"(?:\A|[.:;!?]\s+|\n\n|[-*|] )\s*"
        self._opening = re.compile(rf"{begin}({'|'.join(openings)})\b") if openings else None

    @classmethod
    def load(cls, path: Path = WORDS_FILE) -> Vocabulary:
        """Read the words of a file.

        Raises:
            ValueError: an entry has a key that is not known, or lacks one.
        """
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        return cls([word_of(entry) for entry in content["word"]], content["openings"])

    def findings(self, path: str, texts: Iterable[Text]) -> list[Finding]:
        """Return the forbidden words of a file. Code between backticks is not prose."""
        return [
            Finding(path, text.line_of(offset), text.kind, " ".join(found.split()), write)
            for text in texts
            for offset, found, write in self._places(path, CODE_SPAN.sub(blank, text.text))
        ]

    def _places(self, path: str, prose: str) -> Iterator[tuple[int, str, str]]:
        """Yield offset, text and replacement of each forbidden word."""
        for place in self._any.finditer(prose) if self._any else ():
            word = next(word for word in self._words if word.expression.match(prose, place.start()))
            if not (matches(path, word.files) or is_allowed(word, prose, place)):
                yield place.start(), place[0], word.write
        for place in self._opening.finditer(prose) if self._opening else ():
            yield place.start(1), place[1], OPENING


def word_of(entry: Mapping[str, object]) -> Word:
    """Make a word from its entry in the file. Raises ValueError for keys that are not known, or absent."""
    if not {"pattern", "write"} <= entry.keys() <= {"pattern", "write", "allowed", "files"}:
        raise ValueError(f"a word has pattern and write, and may have allowed and files; found {dict(entry)}")
    allowed, files = entry.get("allowed"), entry.get("files", [])
    if not isinstance(files, list):
        raise ValueError(f"files is a list of patterns; found {files!r}")
    return Word(
        str(entry["pattern"]),
        whole_words(str(entry["pattern"])),
        str(entry["write"]),
        whole_words(str(allowed)) if allowed else None,
        tuple(map(str, files)),
    )


def whole_words(pattern: str) -> re.Pattern[str]:
    """Compile a pattern for whole words. A space matches any white space, line breaks among it.

    The boundary stands before all alternatives: the engine then tries them at the starts of words only.
    """
    flexible = pattern.replace(" ", r"\s+")
    return re.compile(rf"\b(?:{flexible})\b", re.IGNORECASE)


def blank(found: re.Match[str]) -> str:
    """Replace all but line breaks by a character that is in no word, so that places stay."""
    return re.sub(r"[^\n]", "`", found[0])


def is_allowed(word: Word, prose: str, found: re.Match[str]) -> bool:
    """Whether a phrase in which the word is right covers the match."""
    if word.allowed is None:
        return False
    phrases = word.allowed.finditer(prose)
    return any(phrase.start() <= found.start() and found.end() <= phrase.end() for phrase in phrases)


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path matches one of the patterns."""
    return any(fnmatch(path, pattern) for pattern in patterns)
