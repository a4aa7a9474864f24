"""A small expression language for conditions on actions, values of labels and scores; compiled to numpy
columns, never eval.

    action.type == 'click' and not action.bot          a condition: which actions make a label true
    sum(action.seconds)                                a value: what number the label takes
    click * (1 + 0.1 * watch) + 20 * click * buy       a score: labels' predictions combined

Numbers, 'text', true, false, fields; `or and not`, `== != < <= > >=`, `in [...]`, `not in [...]`, `is
null`, `is not null`, `+ - * / %`; functions abs, exp, log, log1p, max, min, sqrt; over a label's actions
sum, count, max, min, last.

Null: a comparison or `in` with a null is false (so is `!=`), a null condition counts as false, arithmetic
and functions with a null are null, and so is arithmetic without a finite result (1 / 0). Aggregates skip
nulls; sum and count of nothing are 0, max, min and last of nothing are null. Text is compared by 64-bit
hash: only `==`, `!=` and `in`.
"""

from freshet.config.expression.columns import Column
from freshet.config.expression.compile import (
    Expression,
    LabelValue,
    compile_condition,
    compile_score,
    compile_value,
)
from freshet.config.expression.tokens import WORDS
from freshet.config.expression.tree import AGGREGATES, FUNCTIONS, Aggregate

__all__ = [
    "AGGREGATES",
    "FUNCTIONS",
    "RESERVED",
    "Aggregate",
    "Column",
    "Expression",
    "LabelValue",
    "compile_condition",
    "compile_score",
    "compile_value",
]

RESERVED = frozenset(WORDS) | frozenset(FUNCTIONS) | frozenset(AGGREGATES) | {"action"}
"""Names that mean something in the language and so cannot name a label."""
