"""`verify` passes a drafter that is what its card says, and finds a planted fault in weights, code, card and revision."""

import hashlib
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hub_upload.__main__ import app
from hub_upload.hub import verify as verify_module
from hub_upload.hub.push import checked_files, push
from hub_upload.package import package
from modeling_dspark import DSparkModel
from tests.hub_upload.bigrams import NEW_TOKENS, SETS, card_of, count_rounds, make_pair
from training.data.features import fingerprint
from training.evaluation.figures import acceptance_figures
from training.evaluation.report import EvalReport, SetReport


REPO = "org/tiny"


def write_manifest(folder):
    """`files.json`, as `package` writes it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "files.json")
    files = {
        path.relative_to(folder).as_posix(): {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "size": path.stat().st_size,
        }
        for path in paths
    }
    (folder / "files.json").write_text(json.dumps({"format": 1, "files": files}))


@pytest.fixture(scope="session")
def honest(tmp_path_factory, tiny_tokenizer):
    """A target, prompts, and a package whose card says what was counted by hand; not to be changed."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("honest")
    target, drafter, table, texts = make_pair(tiny_tokenizer)
    target.save_pretrained(folder / "target")
    tiny_tokenizer.save_pretrained(folder / "target")
    drafter.save_pretrained(folder / "drafter")
    (folder / "drafter" / "README.md").write_text(card_of(texts, table))
    package(folder / "drafter", folder / "package")
    write_manifest(folder / "package")
    (folder / "texts.json").write_text(json.dumps(texts))
    (folder / "table.json").write_text(json.dumps(table))
    lines = [json.dumps({"text": text, "source": name}) for name, prompts in SETS.items() for text in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def copy(honest, tmp_path):
    return shutil.copytree(honest / "package", tmp_path / "package")


def run_verify(honest, name, *options):
    common = ["--target", honest / "target", "--prompts", honest / "prompts.jsonl", "--limit", 6]
    words = ["verify", name, *common, "--max-new-tokens", NEW_TOKENS, *options]
    return CliRunner().invoke(app, [str(word) for word in words])


def rows_of(result):
    return dict(re.findall(r"^(?:ok|FAIL|open) +([a-z]+(?: [a-z]+)?) +(.*)$", result.stdout, re.MULTILINE))


def failed(result):
    assert result.exit_code in (0, 1), result.output
    return re.findall(r"^FAIL +([a-z]+(?: [a-z]+)?)  ", result.stdout, re.MULTILINE)


@pytest.fixture(scope="session")
def verified(honest):
    """The honest package verified in a process of its own: the output, and what that process saw."""
    seen, probe = [], verify_module._probe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_module, "_probe", lambda *arguments: seen.append(probe(*arguments)) or seen[-1])
        return run_verify(honest, honest / "package"), seen[0]


@pytest.fixture
def seen_before(verified, monkeypatch):
    """Weights and code of the copy are those of `verified`: no need to decode again."""
    monkeypatch.setattr(verify_module, "_probe", lambda *_: verified[1])
    monkeypatch.setattr(verify_module, "_check_loading", lambda *_: verify_module.Check("loading", "ok", "before"))


def test_what_is_true_passes(honest, verified):
    result, _ = verified
    assert (result.exit_code, failed(result)) == (0, []), result.output
    rows = rows_of(result)
    assert "12 prompts, 288 tokens: each as without the drafter" in rows["greedy text"]
    claimed, measured = re.search(r"claimed ([\d.]+), measured ([\d.]+)", rows["accepted length"]).groups()
    assert claimed == measured  # counted by hand, and by the drafter in another process
    card = (honest / "package" / "README.md").read_text()
    by_hand = re.search(r"^\| pooled .*\| ([\d. ]+) \|$", card, re.MULTILINE)[1].split()
    assert (
        f"by position {' '.join(by_hand[:3])}, as claimed (3 positions" in rows["acceptance"]
    )  # the last is tried too rarely
    assert result.stdout.splitlines()[-1] == "passed; nothing to check against: weights"


def flip(folder):
    """Turn the drafts into bad ones, and leave every other file as it is."""
    weights = load_file(folder / "model.safetensors")
    flipped = {name: -tensor if "markov_w2" in name else tensor for name, tensor in weights.items()}
    save_file(flipped, folder / "model.safetensors", metadata={"format": "pt"})


def test_other_weights_than_were_packaged(honest, copy, seen_before):
    """What they do is the next test's matter."""
    flip(copy)
    result = run_verify(honest, copy)
    assert failed(result) == ["manifest"]
    assert "model.safetensors is not as packaged" in rows_of(result)["manifest"]


def test_other_code_is_not_run(honest, copy, tmp_path, monkeypatch):
    mark = tmp_path / "it ran"
    monkeypatch.setenv("MARK", str(mark))
    path = copy / "modeling_dspark.py"
    path.write_text(path.read_text() + "\nimport os\n\nopen(os.environ['MARK'], 'w')\n")
    write_manifest(copy)
    result = run_verify(honest, copy)
    assert failed(result) == ["code", "decoding"]
    assert "modeling_dspark.py differs" in rows_of(result)["code"]
    assert not mark.exists()


def test_code_from_elsewhere(honest, copy):
    config = json.loads((copy / "config.json").read_text())
    config["auto_map"]["AutoModel"] = "other/repo--modeling_dspark.DSparkModel"
    (copy / "config.json").write_text(json.dumps(config))
    assert failed(run_verify(honest, copy)) == ["manifest", "code", "decoding"]
    (copy / "extra_dspark.py").write_text("")
    (copy / "model_heads.py").unlink()
    said = rows_of(run_verify(honest, copy))["code"]
    assert "model_heads.py is missing" in said
    assert "extra_dspark.py is not of this project" in said


@pytest.mark.slow
def test_accepted_code_runs_and_is_judged(honest, copy):
    """Code that keeps every draft makes other text; with the digest of what was read it may run, with another not."""
    path = copy / "draft_accept.py"
    code = path.read_text()
    keeps_all = code.replace("_leading(draft_tokens == choices[:, :-1], ", "_leading(draft_tokens == draft_tokens, ")
    assert keeps_all != code
    path.write_text(keeps_all)
    write_manifest(copy)
    digest = re.search(r"--accept-code (\w{16})", run_verify(honest, copy).stdout)[1]
    assert "decoding" in failed(run_verify(honest, copy, "--accept-code", "0" * 16))
    result = run_verify(honest, copy, "--accept-code", digest)
    assert "greedy text" in failed(result)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda card: re.sub(r"(\| pooled .*?\| )[\d.]+( \| 4.00)", r"\g<1>4.60\2", card), ["card"]),
        (lambda card: re.sub(r"(\| alpha .*?\| )[\d.]+( \| 4.00)", r"\g<1>4.60\2", card), ["card"]),
        (lambda card: re.sub(r'"value": [\d.]+', '"value": 4.6', card, count=1), ["card"]),
        (lambda card: re.sub(r"\| alpha \| 6", "| alpha | 600", card), ["card"]),
        (lambda card: re.sub(r"(\| pooled .*\| )[\d.]+ ", r"\g<1>0.99 ", card), ["acceptance"]),
        (
            lambda card: re.sub(
                r"(\| \d+ \| )[\d.]+( \| 4.00)", r"\g<1>4.60\2", re.sub(r'"value": [\d.]+', '"value": 4.6', card)
            ),
            ["accepted length"],
        ),
    ],
    ids=["pooled", "set", "model-index", "prompts", "position", "all alike"],
)
def test_other_numbers_in_the_card(honest, copy, seen_before, change, rows):
    """One number contradicts the others; all of them, changed alike, contradict the drafter."""
    card = (copy / "README.md").read_text()
    changed = change(card)
    assert changed != card
    (copy / "README.md").write_text(changed)
    write_manifest(copy)
    result = run_verify(honest, copy)
    assert set(rows) <= set(failed(result)) <= {*rows, "accepted length", "acceptance"}
    assert result.exit_code == 1


def test_a_length_below_one_is_no_length(honest, copy, seen_before):
    card = (copy / "README.md").read_text()
    (copy / "README.md").write_text(re.sub(r"(\| pooled .*?\| )[\d.]+( \| 4.00)", r"\g<1>0\2", card))
    assert "at least 1, got 0.0" in rows_of(run_verify(honest, copy))["card"]


def test_numbers_of_eval_results(honest, copy, seen_before):
    (copy / ".eval_results").mkdir()
    entry = (
        "- dataset:\n    id: org/prompts\n    task_id: alpha\n  value: 4.6\n  notes: accepted length (tau), greedy\n"
    )
    (copy / ".eval_results" / "tau.yaml").write_text(entry)
    assert "tau.yaml says 4.6 for `alpha`" in rows_of(run_verify(honest, copy))["card"]


def test_a_card_without_numbers_claims_nothing(honest, copy, seen_before):
    (copy / "README.md").write_text("---\nlibrary_name: transformers\n---\n\nA card.\n")
    write_manifest(copy)
    result = run_verify(honest, copy)
    assert (result.exit_code, failed(result)) == (0, [])
    assert "nothing is claimed" in rows_of(result)["accepted length"]
    assert "nothing to check against: weights, card, accepted length" in result.stdout


def test_temperatures_of_another_calibration(honest, copy, seen_before):
    (copy / "calibration.json").write_text('{"temperatures": [1, 2, 3, 4]}')
    assert "different temperatures" in rows_of(run_verify(honest, copy))["weights"]


def test_counts_that_do_not_add_up(honest, copy, verified, monkeypatch):
    """A drafter that reports fewer rounds than the target had forwards is caught by counting those."""
    answer = json.loads(json.dumps(verified[1]))
    answer["prompts"][0]["forwards"] += 3
    monkeypatch.setattr(verify_module, "_probe", lambda *_: answer)
    monkeypatch.setattr(verify_module, "_check_loading", lambda *_: verify_module.Check("loading", "ok", "before"))
    result = run_verify(honest, copy)
    assert failed(result) == ["accepted length"]
    assert "not those of the target's forwards" in result.stdout


@pytest.fixture(scope="session")
def report(honest):
    """What `training.evaluate` would report of the same rounds, counted by hand, and of these weights."""
    texts = json.loads((honest / "texts.json").read_text())
    table = json.loads((honest / "table.json").read_text())
    parts = {name: [count_rounds(text, table) for text in each] for name, each in texts.items()}
    pooled = set_of([each for part in parts.values() for each in part])
    sets = {name: set_of(part) for name, part in parts.items()}
    drafter = {"fingerprint": fingerprint(DSparkModel.from_pretrained(honest / "drafter", dtype="bfloat16"))}
    return EvalReport(drafter, {}, {"dtype": "bfloat16"}, {}, sets, pooled, (), None)


def set_of(counted):
    """Figures of some prompts, as a report has them."""
    columns = [[value for each in counted for value in getattr(each, name)] for name in ("tried", "kept", "tokens")]
    figures = acceptance_figures(
        verified=columns[0], accepted=columns[1], new_tokens=columns[2], num_draft_positions=4
    )
    return SetReport(len(counted), 0, figures, None, None, None)


def test_a_report_has_the_last_word(honest, copy, report, tmp_path, seen_before):
    path = tmp_path / "report.json"
    path.write_text(report.to_json())
    result = run_verify(honest, copy, "--report", path)
    assert (result.exit_code, failed(result), result.stdout.splitlines()[-1]) == (0, [], "passed")
    assert rows_of(result)["weights"] == "fit the report"
    path.write_text(replace(report, drafter={"fingerprint": "0123456789abcdef"}).to_json())
    assert failed(run_verify(honest, copy, "--report", path)) == ["weights"]
    path.write_text(json.dumps({"sections": [], "drafter": {"sha256": "0" * 64}}))
    assert failed(run_verify(honest, copy, "--report", path)) == ["weights"]


def test_a_card_that_is_not_of_the_report(honest, copy, report, tmp_path, seen_before):
    """A digit of one position: too little for any measurement, and found all the same."""
    path, card = tmp_path / "report.json", (copy / "README.md").read_text()
    path.write_text(report.to_json())
    row = re.search(r"^\| alpha .*\| ([\d.]+) [\d. -]+\|$", card, re.MULTILINE)
    start, end = row.span(1)
    (copy / "README.md").write_text(f"{card[:start]}{float(row[1]) + 0.02:.2f}{card[end:]}")
    write_manifest(copy)
    result = run_verify(honest, copy, "--report", path)
    assert failed(result) == ["card"]
    assert f"`alpha` says {float(row[1]) + 0.02:.2f}"[:-1] in rows_of(result)["card"]


def test_prompts_of_another_kind_contradict_no_claim(honest, tmp_path, verified, seen_before):
    """A claim for all sets together is not one for prompts of other sets, however far it is from what they measure."""
    lines = [json.loads(line) for line in (honest / "prompts.jsonl").read_text().splitlines()]
    others = tmp_path / "others.jsonl"
    others.write_text("\n".join(json.dumps(line | {"source": "others"}) for line in lines))
    measured = re.search(r"measured ([\d.]+)", rows_of(verified[0])["accepted length"])[1]
    result = run_verify(honest, honest / "package", "--prompts", others, "--limit", 12)
    assert failed(result) == []
    row = rows_of(result)["accepted length"]
    assert row.startswith(f"{measured} measured in ")
    assert row.endswith("claimed for alpha, beta alone: give `--prompts`")
    assert "acceptance" not in rows_of(result)
    assert result.stdout.splitlines()[-1] == "passed; nothing to check against: weights, accepted length"


def test_a_dry_run_runs_nothing(honest, copy, monkeypatch):
    """And finds what is to be found without."""
    monkeypatch.setattr(verify_module, "_probe", lambda *_: pytest.fail("it was run"))
    result = run_verify(honest, copy, "--dry-run")
    assert (result.exit_code, failed(result)) == (0, []), result.output
    assert set(rows_of(result)) == {"revision", "files", "manifest", "code", "weights", "card"}
    assert "the drafter was not loaded" in result.stdout.splitlines()[-1]
    flip(copy)
    result = run_verify(honest, copy, "--dry-run")
    assert (result.exit_code, failed(result)) == (1, ["manifest"])


def test_pickles_and_secrets_stop_it(honest, copy):
    torch.save({}, copy / "pytorch_model.bin")
    assert failed(run_verify(honest, copy)) == ["files", "manifest", "decoding"]


def test_a_revision_is_judged_and_no_other(honest, copy, hub, tmp_path, monkeypatch, verified):
    """A tag has other weights, with a manifest of their own, and `main` is good: each gets its own verdict."""
    for name, value in hub.environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)  # for the process that decodes
    flip(copy)
    write_manifest(copy)
    bad = push(checked_files(copy), REPO, tag="v1").commit
    good = push(checked_files(honest / "package"), REPO).commit
    result = run_verify(honest, REPO, "--revision", "v1")
    rows = rows_of(result)
    assert rows["revision"] == f"v1 = {bad}"
    assert failed(result) == ["accepted length", "acceptance"], result.output
    assert "288 tokens: each as without" in rows["greedy text"]  # bad drafts cost time, not text
    assert rows["loading"].startswith("by AutoModel, with the code that came with it")
    monkeypatch.setattr(verify_module, "_probe", lambda *_: verified[1])
    monkeypatch.setattr(verify_module, "_check_loading", lambda *_: verify_module.Check("loading", "ok", "before"))
    result = run_verify(honest, REPO)
    assert (rows_of(result)["revision"], failed(result)) == (f"main = {good}", [])
    missing = run_verify(honest, REPO, "--revision", "v2")
    assert missing.exit_code == 2
    assert f"error: `{REPO}` has no such revision" in missing.stderr
    # What is in the cache under the name of a commit is not taken for it, nor is another commit than was asked for.
    cached = tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots" / good / "README.md"
    content = cached.read_bytes()
    cached.unlink()
    cached.write_bytes(content + b"\nSomething else.\n")
    result = run_verify(honest, REPO, "--revision", good)
    assert failed(result) == ["revision", "manifest", "decoding"]
    assert "README.md is not the Hub's" in rows_of(result)["revision"]
    hub.store.repositories[REPO].branches["0" * 40] = good
    result = run_verify(honest, REPO, "--revision", "0" * 40)
    assert f"the Hub answers 000000000000 with {good[:12]}" in rows_of(result)["revision"]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("nowhere", [], "no folder `nowhere`"),
        ("./no/where", [], "no folder `./no/where`"),
        ("package", ["--revision", "v1"], "is a folder, which has none"),
        ("package", ["--limit", "2"], "at least 6"),
        ("package", ["--prompts", "none.jsonl"], "no file `none.jsonl`"),
        ("package", ["--report", "prompts.jsonl"], "is no report"),
    ],
)
def test_bad_arguments(honest, monkeypatch, name, options, said):
    monkeypatch.chdir(honest)
    result = run_verify(honest, name, *options)
    assert result.exit_code == 2
    assert re.search(f"^error: .*{re.escape(said)}", result.stderr), result.output
