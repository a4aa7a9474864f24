"""The update rules, described once: name, parameters, state. Spec keys, docs, metrics and the native table
follow from this.

Only descriptions; the arithmetic is in the native table and its numpy oracle (`freshet.tables`). Adding a
rule: a descriptor here, its step there, its oracle in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from freshet.config.spec.forms import Parameter

__all__ = ["COUNT", "OPTIMIZERS", "Rule", "complete", "rule_of"]


@dataclass(frozen=True, slots=True)
class Rule:
    """An update rule. State is float32; `row_state` floats a slot plus `float_state` floats for each of its
    floats.
    """

    name: str
    doc: str
    parameters: tuple[Parameter, ...]
    row_state: int
    float_state: int

    def parameter(self, name: str) -> Parameter:
        """The parameter of that name. Raises KeyError."""
        return {p.name: p for p in self.parameters}[name]

    def state_floats(self, width: int) -> int:
        """How many floats of state a slot of this width carries."""
        return self.row_state + self.float_state * width


def _lr(default: float) -> Parameter:
    return Parameter("lr", default, 0.0, 100.0, True, "step size")


def _accumulator(default: float) -> Parameter:
    return Parameter(
        "initial_accumulator", default, 0.0, 1e6, False, "squared gradient assumed before the first step"
    )


def _eps(default: float) -> Parameter:
    return Parameter("eps", default, 0.0, 1.0, True, "added to the root, so that nothing is divided by 0")


OPTIMIZERS: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("sgd", "plain steps against the gradient", (_lr(0.1),), 0, 0),
        Rule(
            "adagrad",
            "one sum of squared gradients per float (Duchi et al. 2011)",
            (_lr(0.1), _accumulator(0.0), _eps(1e-8)),
            0,
            1,
        ),
        Rule(
            "rowwise_adagrad",
            "one sum per row, of the mean squared gradient (Mudigere et al. 2021)",
            (_lr(0.2), _accumulator(0.1), _eps(1e-8)),
            1,
            0,
        ),
        Rule(
            "rowwise_rmsprop",
            "one mean per row, of its squared gradients, that forgets: steps do not shrink for good, so rows"
            " follow what drifts (Hinton 2012, by rows)",
            (
                _lr(0.01),
                Parameter("decay", 0.99, 0.0, 0.999999, doc="how slowly the mean squared gradient forgets"),
                _accumulator(0.1),
                _eps(1e-8),
            ),
            1,
            0,
        ),
        Rule(
            "adam",
            "first and second moments per float, steps counted per row (Kingma and Ba 2015)",
            (
                _lr(1e-3),
                Parameter("beta1", 0.9, 0.0, 0.999999, False, "how slowly the mean gradient forgets"),
                Parameter(
                    "beta2", 0.999, 0.0, 0.999999, False, "how slowly the mean squared gradient forgets"
                ),
                _eps(1e-8),
            ),
            1,
            2,
        ),
        Rule(
            "ftrl",
            "FTRL-proximal, sparse through L1 (McMahan et al. 2013)",
            (
                _lr(0.1),
                Parameter("beta", 1.0, 0.0, 1e6, False, "smooths the first steps"),
                Parameter("l1", 0.0, 0.0, 1e6, False, "a float whose evidence stays below this is exactly 0"),
                Parameter("l2", 0.0, 0.0, 1e6, False, "pulls floats towards 0"),
            ),
            0,
            2,
        ),
    )
}
"""Every update rule by name, with the defaults that the measurements behind DESIGN §10 chose."""


COUNT = Rule(
    "count",
    "the value tells how often the row was stepped, in buckets, whatever its gradients were",
    (),
    1,
    0,
)
"""The rule of the slot that the expert counts reads. No table can ask for it: it is none of OPTIMIZERS."""


def rule_of(name: str) -> Rule:
    """The rule of a slot. Raises KeyError."""
    return COUNT if name == COUNT.name else OPTIMIZERS[name]


def complete(name: str, given: Mapping[str, float] | None = None) -> dict[str, float]:
    """All parameters of the rule: its defaults, with `given` over them. Raises KeyError for an unknown
    rule.
    """
    return {p.name: float((given or {}).get(p.name, p.default)) for p in OPTIMIZERS[name].parameters}
