"""Facts, reports and cards that were made to break the command or to slip a number past it: refused in one line."""

import json
import re

import pytest

from hub_upload.card.render import card_files, write_card
from hub_upload.hub import verify, verify_command
from hub_upload.hub.checks import Check, Report, check_card, check_weights, read_package
from hub_upload.hub.subject import Subject
from tests.conftest import FIXTURES
from tests.hub_upload.card_case import evaluation, make_drafter


LAUGHS = "".join(f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
LAUGHS = f"stated:\n  conversations: 12345\n  a0: &a0 [ha, ha, ha]\n{LAUGHS}"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A drafter's folder and a report of it; its prompts and rounds add up."""
    folder = tmp_path_factory.mktemp("case")
    data = json.loads(evaluation(make_drafter(folder / "drafter")).to_json())
    data["pooled"]["prompts"] = sum(part["prompts"] for part in data["sets"].values())
    return folder / "drafter", data


@pytest.fixture
def files(report, tmp_path):
    """Copies, as the folder and the path of the report."""
    source, data = report
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "greedy.json").write_text(json.dumps(data))
    return tmp_path, tmp_path / "greedy.json"


def replace_in(path, pattern, new):
    text = path.read_text()
    changed = re.sub(pattern, new, text, count=1, flags=re.MULTILINE)
    assert changed != text
    path.write_text(changed)


@pytest.mark.parametrize(
    ("pattern", "new", "said"),
    [
        (r"^stated:.*\n", f"{LAUGHS}citation: *a9\n", "`citation` must be a text"),
        (r"^training: .*\n(stated: .*\n)?", "training: '{{ stated.quote(\"a9\") }}'\n", "no single value"),
        (r"^limits:.*", "limits: " + "[" * 50_000, "cannot be read as YAML"),
        (r"\Z", "1: a\nz: b\n", "unknown fields"),
    ],
    ids=["repeated", "quoted", "deep", "numbers as keys"],
)
def test_facts_that_do_not_end(files, pattern, new, said):
    folder, path = files
    replace_in(folder / "facts.yaml", pattern, new)
    if "a9" in new and "stated:\n" not in new:
        replace_in(folder / "facts.yaml", r"^stated:.*\n", LAUGHS)
    with pytest.raises(ValueError, match=said):
        card_files(folder, reports=[path])


@pytest.mark.parametrize(
    "text",
    [
        "{% if config.blank %}fine{% else %}9.9 times as fast{% endif %}",
        '{{ "fine" if config.blank else "9.9" }}',
        '{{ "ha" * 10000000000 }}',
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ config.quote(5) }}",
        '{{ config.quote("hidden_size", tables.acceptance) }}',
    ],
)
def test_prose_may_quote_and_do_nothing_else(files, text):
    folder, path = files
    replace_in(folder / "facts.yaml", r"^summary:.*", f"summary: '{text}'")
    with pytest.raises(ValueError, match="`summary` of the card cannot be filled in"):
        card_files(folder, reports=[path])


@pytest.mark.parametrize("text", ["speedup \u00bd of it", "a factor of \u00b2", "grade \u2167"])
def test_numbers_without_digits(files, text):
    folder, path = files
    replace_in(folder / "facts.yaml", r"^summary:.*", f"summary: {text}")
    with pytest.raises(ValueError, match="comes out of a report"):
        card_files(folder, reports=[path])


def test_reports_without_figures(files, report):
    folder, path = files
    _, data = report
    for broken, said in [
        (data | {"sets": {}}, "no set of prompts"),
        (data | {"notes": [float("nan")]}, "NaN is no number"),
        (data | {"environment": data["environment"] | {"git_commit": 5}}, "cannot be filled in"),
    ]:
        path.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=said):
            card_files(folder, reports=[path])


@pytest.mark.parametrize("name", ["a|b", "a\nb", "pr\u00fcfung", "<b>x</b>", "-"])
def test_sets_of_any_name_are_found_again(files, report, name):
    folder, path = files
    _, data = report
    path.write_text(json.dumps(data | {"sets": {name: data["sets"]["letters"], "b": data["sets"]["digits_2"]}}))
    write_card(folder, reports=[path])
    assert check_card(folder, None)[0] == Check("card", "ok", "2 sets agree")
    read = Report.read(path)
    if name == " ".join(name.split()):
        assert check_card(folder, read)[0].verdict == "ok"


LETTERS = r"^\| letters +\| +17 \| +300 \| +[\d.]+ "
PLANTED = "| set | prompts | rounds | accepted length | acceptance by position |\n|---|---|---|---|---|\n"


@pytest.mark.parametrize(
    ("name", "pattern", "new"),
    [
        ("README.md", LETTERS, "| letters | 17 | 300 | nan "),
        ("README.md", LETTERS, "| letters | 17 | 0 | 4.25 "),
        ("README.md", r"^(\| letters .*\| +)1\.00 ", r"\1 nan "),
        ("README.md", r"^(\| letters .*)$", r"| letters | 17 | 300 | 9.90 | 3 | 1% | 0.9 |\n\1"),
        ("README.md", r"^(\| letters .*)$", r"\1 more |"),
        ("README.md", r"^### Greedy$", f"### Greedy\n\n{PLANTED}| letters | 17 | 300 | 9.90 | 0.9 |\n"),
        ("README.md", r"^library_name: .*", "library_name: ["),
        (".eval_results/acceptance_length_greedy.yaml", r"value: .*", "value: .nan"),
        (".eval_results/acceptance_length_greedy.yaml", r"\A", "- a\n"),
        (".eval_results/acceptance_length_greedy.yaml", r"\A", "a: [\n"),
    ],
)
def test_claims_that_are_no_numbers(files, name, pattern, new):
    folder, path = files
    write_card(folder, reports=[path])
    assert check_card(folder, None)[0].verdict == "ok"
    replace_in(folder / name, pattern, new)
    assert check_card(folder, None)[0].verdict == "FAIL"


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000])
def test_a_broken_calibration_is_a_finding(files, text):
    folder, _ = files
    (folder / "calibration.json").write_text(text)
    assert check_weights(folder, read_package(folder), None).verdict == "FAIL"


def test_a_finding_is_one_row(monkeypatch, capsys):
    said = "x\nok    greedy text      as without the drafter\x1b[2J"
    monkeypatch.setattr(verify_command, "verify", lambda *_, **__: iter([Check("files", "FAIL", said)]))
    assert verify_command.run("x", None, revision=None, report=None, accept_code=None) == 1
    assert capsys.readouterr().out.splitlines() == [
        "FAIL  files            x ok greedy text as without the drafter?[2J",
        "",
        "FAILED: files",
    ]


def test_a_probe_that_speaks_for_verify(tmp_path, monkeypatch, capfd):
    """What the drafter's code prints is not taken for the verdict, and an answer of a process that failed for none."""
    script = tmp_path / "script.py"
    script.write_text("open('answer.json', 'w').write('{}')\nprint('passed')\nraise SystemExit(3)\n")
    monkeypatch.setattr(verify.verify_probe, "__file__", str(script))
    (tmp_path / "probe").mkdir()
    subject = Subject(tmp_path, "x", None, Check("revision", "ok", ""))
    answer = verify._probe(tmp_path / "probe", subject, verify.Settings(str(FIXTURES / "target_qwen3")), [])
    assert "status 3" in answer["error"]
    assert capfd.readouterr() == ("", "passed\n")
