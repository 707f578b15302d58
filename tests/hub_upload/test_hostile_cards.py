"""Facts, reports and cards that were made to break the command or to slip a number past it: refused in one line."""

import json
import re

import pytest

from hub_upload.card.header import greedy_lengths
from hub_upload.card.quotes import slug
from hub_upload.card.render import card_files, write_card
from hub_upload.hub import verify, verify_command
from hub_upload.hub.checks import Check, check_calibration, check_card
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
        (r"^training: .*\n(stated: .*\n)?", "training: '{{ stated.quote(\"a9\") }}'\n", "not a single value"),
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
        (data | {"notes": [float("nan")]}, "NaN is not a number"),
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
    lengths = [[round(data["sets"][key]["acceptance"]["acceptance_length"], 4)] for key in ("letters", "digits_2")]
    assert greedy_lengths(folder) == dict(zip((slug(name), "b"), lengths, strict=True))


@pytest.mark.parametrize(
    ("name", "pattern", "new"),
    [
        ("README.md", r"^library_name: .*", "library_name: ["),
        ("README.md", r"^( +value: ).*", r"\1 many"),
        ("README.md", r"^( +value: ).*", r"\1 0.5"),
        ("README.md", r"^( +value: ).*", r"\1 true"),
        (".eval_results/acceptance_length_greedy.yaml", r"value: .*", "value: .nan"),
        (".eval_results/acceptance_length_greedy.yaml", r"value: .*", "value: [4]"),
        (".eval_results/acceptance_length_greedy.yaml", r"\A", "- a\n"),
        (".eval_results/acceptance_length_greedy.yaml", r"\A", "a: [\n"),
    ],
)
def test_metadata_that_are_not_lengths(files, name, pattern, new):
    folder, path = files
    write_card(folder, reports=[path])
    assert check_card(folder) == Check("card", "ok", "acceptance lengths of 2 sets of prompts")
    replace_in(folder / name, pattern, new)
    assert check_card(folder).verdict == "FAIL"


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000])
def test_a_broken_calibration_is_a_finding(files, text):
    folder, _ = files
    (folder / "calibration.json").write_text(text)
    assert check_calibration(folder).verdict == "FAIL"


def test_a_finding_is_one_row(monkeypatch, capsys):
    said = "x\nok    greedy text      as without the drafter\x1b[2J"
    monkeypatch.setattr(verify_command, "verify", lambda *_, **__: iter([Check("files", "FAIL", said)]))
    assert verify_command.run("x", None, revision=None, accept_code=None) == 1
    assert capsys.readouterr().out.splitlines() == [
        "FAIL  files              x ok greedy text as without the drafter?[2J",
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
