"""What is read out of Markdown pages: fenced blocks, links, the anchors of headings.

Blocks in a language that can be run are run (`tests/docs/running.py`), unless the line before them is

    <!-- not executed: why -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,}) *(?P<language>[\w+-]*)")
LEFT_OUT = re.compile(r"<!-- not executed: (?P<why>\S.*?) -->")
LINK = re.compile(
    r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\((?P<target><[^>]*>|[^()\s]*(?:\([^()\s]*\)[^()\s]*)*)(?:\s+\"[^\"]*\")?\)"
)
HTML_LINK = re.compile(r"<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)=\"([^\"]+)\"")
HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*\s*$")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: Path
    line: int  # of its first line of text, from 1
    language: str
    text: str
    left_out: str  # why it is not executed; "": it is

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every Markdown page of the repository, but those of tools and builds."""
    skipped = {"build", "dist", "node_modules"}
    return sorted(
        path
        for path in ROOT.rglob("*.md")
        if not any(part.startswith(".") or part in skipped for part in path.relative_to(ROOT).parts)
    )


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        fence = FENCE.match(lines[at])
        if fence is None:
            at += 1
            continue
        indent, start = len(fence["indent"]), at + 1
        end = next((i for i in range(start, len(lines)) if lines[i].strip() == fence["ticks"]), -1)
        assert end >= 0, f"{page}:{start}: a fenced block that never ends"
        text = "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines[start:end])
        before = next((line for line in reversed(lines[:at]) if line.strip()), "")
        left_out = LEFT_OUT.search(before)
        yield Block(page, start + 1, fence["language"], text + "\n", left_out["why"] if left_out else "")
        at = end + 1


def prose(page: Path) -> list[str]:
    """The page's lines without those of fenced blocks, and without code within a line."""
    out, closing = [], ""
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = FENCE.match(line)
        if closing:
            closing = "" if line.strip() == closing else closing
            out.append("")
        elif fence:
            closing = fence["ticks"]
            out.append("")
        else:
            out.append(line)
    return out


def links(page: Path) -> Iterator[tuple[int, str]]:
    """(line, target) of every link and image."""
    for number, line in enumerate(prose(page), 1):
        bare = re.sub(r"`[^`]*`", "``", line)
        for match in LINK.finditer(bare):
            yield number, match["target"].strip("<>")
        for found in HTML_LINK.findall(bare):
            yield number, found


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings, and those set by hand."""
    found: set[str] = set()
    for line in prose(page):
        heading = HEADING.match(line)
        if heading:
            name = slug(heading[2])
            n = 0
            while (name if n == 0 else f"{name}-{n}") in found:
                n += 1
            found.add(name if n == 0 else f"{name}-{n}")
        found.update(re.findall(r"<a\s+(?:id|name)=\"([^\"]+)\"", line))
    return found


def slug(heading: str) -> str:
    """A heading as GitHub's anchor: lower case, words joined by hyphens, no other signs."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[^\w\- ]", "", text.replace("`", "").strip().lower())
    return text.replace(" ", "-")
