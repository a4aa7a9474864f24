"""Reference pages in docs/reference/, written from the code: `make docs` writes them anew.

It stands outside the package because it may import every layer of it. A page is a function that returns its
whole text, the same each time for the same code; `PAGES` lists them. `tests/docs` says which are stale.
"""

from ops.reference.pages import PAGES, Page, index

__all__ = ["PAGES", "Page", "index"]
