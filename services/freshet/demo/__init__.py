"""A small news site with a known truth: readers whose tastes drift, items that come and go, and a spec that
learns them.

`freshet simulate` has its readers visit a running system; `freshet demo` starts everything. What is measured
is what counts: how often what the model chose is clicked, beside random choices and the best possible ones.
"""

from freshet.demo.spec import DEMO_SPEC, UNFINISHED, write_spec

__all__ = ["DEMO_SPEC", "UNFINISHED", "write_spec"]
