"""A simulated news site with known click probabilities, drifting tastes and changing items, and its spec.

`freshet simulate` sends its readers to a running system; `freshet demo` starts both. The simulator measures
the click rate of the model's choices, of random choices and of the best possible ones.
"""

from freshet.demo.spec import DEMO_SPEC, UNFINISHED, write_spec

__all__ = ["DEMO_SPEC", "UNFINISHED", "write_spec"]
