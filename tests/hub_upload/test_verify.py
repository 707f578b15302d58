"""`verify` passes an honest package, and finds a planted fault in weights, code, text, card and revision."""

import hashlib
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hub_upload.__main__ import app
from hub_upload.hub import verify as verify_module
from hub_upload.hub.push import checked_files, push
from hub_upload.package import package
from tests.hub_upload.bigrams import NEW_TOKENS, SETS, card_of, make_pair


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


def lengths_of(result):
    """Measured acceptance lengths and those of the card, by set."""
    row = rows_of(result)["acceptance length"]
    return {name: pair for name, *pair in re.findall(r"(\w+) ([\d.]+) \(card: ([\d.-]+)\)", row)}


def test_an_honest_package_passes(honest, verified):
    result, _ = verified
    assert (result.exit_code, failed(result)) == (0, []), result.output
    rows = rows_of(result)
    assert "12 prompts, 288 tokens: each as without the drafter" in rows["greedy text"]
    # Counted by hand for the card, and as forwards of the target in another process.
    lengths = lengths_of(result)
    assert set(lengths) == set(SETS)
    assert all(measured == card for measured, card in lengths.values())
    assert len(set(map(tuple, lengths.values()))) == 2
    assert result.stdout.splitlines()[-1] == "passed"


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


def test_the_cards_own_length_is_printed(honest, copy, verified, seen_before):
    card = (copy / "README.md").read_text()
    (copy / "README.md").write_text(re.sub(r'"value": [\d.]+', '"value": 4.6', card, count=1))
    lengths, before = lengths_of(run_verify(honest, copy)), lengths_of(verified[0])
    assert lengths == before | {"alpha": [before["alpha"][0], "4.60"]}


@pytest.mark.parametrize("phrase", ["acceptance length", "accepted length"])
def test_lengths_of_eval_results(honest, copy, seen_before, phrase):
    """In both spellings, beside that of `model-index`."""
    (copy / ".eval_results").mkdir()
    entry = f"- dataset:\n    id: org/prompts\n    task_id: alpha\n  value: 4.6\n  notes: {phrase} (tau), greedy\n"
    (copy / ".eval_results" / "tau.yaml").write_text(entry)
    assert re.search(r"alpha [\d.]+ \(card: [\d.]+ or 4\.60\)", rows_of(run_verify(honest, copy))["acceptance length"])


def test_metadata_of_an_earlier_card(honest, copy, verified, seen_before):
    card = (copy / "README.md").read_text()
    earlier = card.replace('"acceptance_length"', '"accepted_length"').replace("Acceptance length", "Accepted length")
    assert earlier != card
    (copy / "README.md").write_text(earlier)
    assert lengths_of(run_verify(honest, copy)) == lengths_of(verified[0])


def test_a_card_without_numbers_states_nothing(honest, copy, seen_before):
    (copy / "README.md").write_text("---\nlibrary_name: transformers\n---\n\nA card.\n")
    write_manifest(copy)
    result = run_verify(honest, copy)
    assert (result.exit_code, failed(result)) == (0, [])
    assert "(card: -)" in rows_of(result)["acceptance length"]
    assert "nothing to check against: card, acceptance length" in result.stdout


def test_temperatures_of_another_calibration(honest, copy, seen_before):
    (copy / "calibration.json").write_text('{"temperatures": [1, 2, 3, 4]}')
    assert "different temperatures" in rows_of(run_verify(honest, copy))["calibration"]


def test_prompts_of_another_kind(honest, tmp_path, seen_before):
    """A card's length for one set of prompts says nothing about another."""
    lines = [json.loads(line) for line in (honest / "prompts.jsonl").read_text().splitlines()]
    others = tmp_path / "others.jsonl"
    others.write_text("\n".join(json.dumps(line | {"source": "others"}) for line in lines))
    result = run_verify(honest, honest / "package", "--prompts", others, "--limit", 12)
    assert failed(result) == []
    assert set(lengths_of(result)) == {"others"}
    assert result.stdout.splitlines()[-1] == "passed; nothing to check against: acceptance length"


def test_a_dry_run_runs_nothing(honest, copy, monkeypatch):
    """And finds what is to be found without."""
    monkeypatch.setattr(verify_module, "_probe", lambda *_: pytest.fail("it was run"))
    result = run_verify(honest, copy, "--dry-run")
    assert (result.exit_code, failed(result)) == (0, []), result.output
    assert set(rows_of(result)) == {"revision", "files", "manifest", "code", "card"}
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
    assert failed(result) == [], result.output
    assert "288 tokens: each as without" in rows["greedy text"]  # bad drafts cost time, not text
    assert all(float(measured) < float(card) for measured, card in lengths_of(result).values())
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
        ("package", ["--prompts", "none.jsonl"], "no file `none.jsonl`"),
    ],
)
def test_bad_arguments(honest, monkeypatch, name, options, said):
    monkeypatch.chdir(honest)
    result = run_verify(honest, name, *options)
    assert result.exit_code == 2
    assert re.search(f"^error: .*{re.escape(said)}", result.stderr), result.output
