"""The commands of the publishing guide do what it says, against a double of the Hub."""

import shlex

from typer.testing import CliRunner

from hub_upload.__main__ import app
from tests.docs.test_snippets import ROOT, commands_of
from tests.hub_upload.conftest import hub, packaged, tiny_pair  # noqa: F401


PAGE = ROOT / "docs" / "guides" / "publish.md"


def test_push_as_the_page_says(hub, packaged, tmp_path, monkeypatch):  # noqa: F811
    packaged.rename((tmp_path / "build").mkdir() or tmp_path / "build" / "my-drafter")
    monkeypatch.chdir(tmp_path)
    commands = [command for command in commands_of(PAGE) if command.startswith("dspark push")]
    assert len(commands) == 2
    outputs = []
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exit_code == 0, result.output
        outputs.append((result.stdout, list(hub.requests)))
    assert outputs[0][1] == []  # the dry run
    repository = hub.store.repositories["my-org/my-drafter"]
    assert repository.private
    assert repository.tags == {"v1.0": repository.branches["main"]}
    shown = PAGE.read_text().split("<!-- not run: asks the Hub -->\n```python\n")[1].split("```")[0]
    assert shown in outputs[1][0]
