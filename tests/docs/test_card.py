"""The example of the card's guide fits the commands beside it."""

import os.path
import shlex
from pathlib import Path

from hub_upload.card.facts import read_facts
from tests.docs.test_snippets import ROOT, blocks_of, commands_of


PAGE = ROOT / "docs" / "guides" / "card.md"


def test_the_example_lists_the_report_that_the_commands_make(tmp_path):
    example = next(block.text for block in blocks_of(PAGE) if block.language == "yaml")
    (tmp_path / "facts.yaml").write_text(example)
    words = next(shlex.split(each) for each in commands_of(PAGE) if each.startswith("dspark card"))
    drafter, report = words[2], words[words.index("--report") + 1]
    assert os.path.normpath(Path(drafter) / read_facts(tmp_path / "facts.yaml").reports[0]) == report
