"""The table of rules about what slows training."""

from trainfast.diagnosis.rules import configuration, environment, machine, training
from trainfast.diagnosis.rules.rule import Case, Finding, Rule, findings

RULES: tuple[Rule, ...] = (
    *machine.RULES,
    *environment.RULES,
    *configuration.RULES,
    *training.RULES,
)

__all__ = ["RULES", "Case", "Finding", "Rule", "findings"]
