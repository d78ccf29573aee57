"""Compares a machine and a configuration with what slows training; runs nothing.

`facts.gather` describes the machine, `settings.Settings` a configuration and
`scripts.read` the source of a script. `rules.RULES` is the table of what can be wrong:
each rule is a pure function of a `Case`. `report.diagnose` puts them together.
"""
