"""A small language for conditions on actions, values of labels, and scores, evaluated over numpy columns.

    action.type == 'click' and not action.bot          a condition: the actions that make a label true
    sum(action.seconds)                                a value: the number that a label takes
    click * (1 + 0.1 * watch) + 20 * click * buy       a score: a combination of the labels' predictions

It has numbers, 'text', true, false and fields; `or and not`, `== != < <= > >=`, `in [...]`, `not in [...]`,
`is null`, `is not null`, `+ - * / %`; the functions abs, exp, log, log1p, max, min and sqrt; and over the
actions of a label sum, count, max, min and last.

A comparison with null is false (also `!=` and `in`), and a null condition is false. Arithmetic and functions
with a null are null, and so is arithmetic without a finite result (1 / 0). Aggregates skip nulls; without a
value sum and count are 0, and max, min and last are null. Text is compared by its 64-bit hash, so only by
`==`, `!=` and `in`. Fields of int and long are compared exactly with integers of up to 64 bits.
"""

from freshet.config.expression.columns import Column
from freshet.config.expression.compile import (
    Expression,
    LabelValue,
    compared_in,
    compile_condition,
    compile_score,
    compile_value,
    postfix_of,
)
from freshet.config.expression.syntax import RESERVED

__all__ = [
    "RESERVED",
    "Column",
    "Expression",
    "LabelValue",
    "compared_in",
    "compile_condition",
    "compile_score",
    "compile_value",
    "postfix_of",
]
