"""The table of rules about what slows training."""

from trainfast.diagnosis.rules import configuration, environment, machine, training
from trainfast.diagnosis.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    *machine.RULES,
    *environment.RULES,
    *configuration.RULES,
    *training.RULES,
)
