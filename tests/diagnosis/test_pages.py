"""The pages about diagnosis name the rules and the guides' rows behind them."""

import re
from pathlib import Path

from trainfast.diagnosis.checklist import STEPS
from trainfast.diagnosis.rules import RULES

DOCS = Path(__file__).parents[2] / "docs"


def test_page_lists_each_rule_with_its_cure_and_source():
    lines = (DOCS / "diagnose.md").read_text().splitlines()
    for rule in RULES:
        assert f"| `{rule.id}` | {rule.cure} | {rule.rows} | {rule.source} |" in lines


def guides():
    return "".join(page.read_text() for page in sorted(DOCS.glob("guides/*.md")))


def test_rows_of_rules_and_checklists_are_in_the_guides_pages():
    known = re.findall(r"^\| ([0-4]\.\d+) \|", guides(), re.MULTILINE)
    named = {row for rule in RULES for row in rule.rows.split()}
    named |= {row for step in STEPS for row in step.rows.split()}
    assert len(known) == len(set(known)) and named <= set(known)


def test_findings_that_the_guides_pages_name_exist():
    lines = [line for line in guides().splitlines() if "finding" in line]
    names = {name for line in lines for name in re.findall(r"`(\w+-[\w-]+)`", line)}
    assert names and names <= {rule.id for rule in RULES}
