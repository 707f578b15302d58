"""A card has the numbers of its reports and no others, refuses what is not the drafter's, and its snippets run."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from matplotlib.image import imread
from typer.testing import CliRunner

from hub_upload.__main__ import app
from hub_upload.card import render
from hub_upload.card.render import card_files, write_card
from hub_upload.package import package
from tests.builders import cache_with_kernels, tiny_target
from tests.hub_upload.card_case import TEMPERATURES, evaluation, latency, make_drafter
from training.common.tables import speed_tables
from training.common.targets import chat_template_hash


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A drafter with a facts file, and its reports beside it."""
    path = tmp_path_factory.mktemp("case")
    drafter = make_drafter(path / "drafter")
    sampled = evaluation(drafter, temperature=0.8, with_speed=False, seed=40)
    (path / "greedy.json").write_text(evaluation(drafter).to_json())
    (path / "sampled-0.8.json").write_text(sampled.to_json())
    (path / "latency.json").write_text(json.dumps(latency(path / "drafter")))
    return path


@pytest.fixture
def folder(case, tmp_path):
    """A copy of the drafter's folder, with copies of the reports beside it."""
    shutil.copytree(case, tmp_path, dirs_exist_ok=True)
    return tmp_path / "drafter"


def reports(folder, *names):
    return [folder.parent / f"{name}.json" for name in names or ("greedy",)]


def text_of(folder, *names):
    return card_files(folder, reports=reports(folder, *names))["README.md"].decode()


def edit(path, change):
    """Apply `change` to the content of a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def set_fact(folder, **fields):
    facts = yaml.safe_load((folder / "facts.yaml").read_text())
    (folder / "facts.yaml").write_text(yaml.safe_dump(facts | fields))


def leaves(value):
    if isinstance(value, dict):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def spellings(value):
    """What a number of a report may look like in a card."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return set(re.findall(r"\d[\d.]*\d|\d", str(value)))
    forms = ["{:.1f}", "{:.2f}", "{:.3f}", "{:.4f}", "{:g}"] if isinstance(value, float) else ["{}", "{:,}"]
    percents = [f"{value:.1%}", f"{value:.2%}"] if isinstance(value, float) else []
    return {form.format(value) for form in forms} | {percent.rstrip("%") for percent in percents}


class TestNumbers:
    def test_every_number_of_results_and_calibration_is_in_a_source(self, folder):
        names = ("greedy", "sampled-0.8", "latency")
        sources = [json.loads(path.read_text()) for path in reports(folder, *names)]
        calibration = json.loads((folder / "calibration.json").read_text())
        known = {form for source in [*sources, calibration] for value in leaves(source) for form in spellings(value)}
        derived = [calibration[name] for name in ("ece_before", "ece_after")]
        derived += [source["pooled"]["calibration"]["ece_floor"] for source in sources[:2]]
        known |= {form for values in derived for form in spellings(sum(values) / len(values))}  # means over positions
        known |= {"0", "1", "2", "3", "11/13", "95"}  # positions; texts that are the same; the interval's level
        text = text_of(folder, *names)
        part = re.sub(r"`[0-9a-f]{12}`|!\[.*\)|digits_2", "", text.split("## Results")[1].split("## Training")[0])
        numbers = re.findall(r"\d[\d,./]*\d|\d", part)
        assert len(numbers) > 100
        assert [number for number in numbers if number not in known] == []

    def test_a_number_of_a_report_is_the_number_of_the_card(self, folder):
        def change(report):
            report["sets"]["letters"]["acceptance"]["acceptance_length"] = 7.7654
            report["pooled"]["speed"]["interval"] = [8.123, 9.876]

        assert "7.77" not in text_of(folder)
        edit(folder.parent / "greedy.json", change)
        text = text_of(folder)
        assert re.search(r"\| letters +\| +17 \| +300 \| +7\.77 \|", text)
        assert "8.12 to 9.88" in text
        assert ModelCard(text).data.eval_results[0].metric_value == 7.7654

    @pytest.mark.parametrize(
        "fields",
        [
            {"summary": "It is 3 times as fast."},
            {"limits": ["Acceptance falls to 40 % on code."]},
            {"thinking": "Off; on, tau is 1.9."},
            {"training": "On 1,000 conversations."},
            {"summary": "Twice as fast: x2.1."},
            {"limits": ["Up to \uff12 drafts."]},
        ],
        ids=lambda fields: str(*fields.values())[:20],
    )
    def test_a_planted_number_is_refused(self, folder, fields):
        set_fact(folder, **fields)
        with pytest.raises(ValueError, match=r"comes out of a report.*Quote it"):
            card_files(folder, reports=reports(folder))

    def test_a_number_planted_in_the_template_is_refused(self, folder, tmp_path, monkeypatch):
        template = tmp_path / "template.md"
        monkeypatch.setattr(render, "_TEMPLATE", template)
        original = (ROOT / "hub_upload" / "templates" / "model_card.md").read_text()
        template.write_text(original)
        assert "## Results" in text_of(folder)
        template.write_text(original.replace("## Limits\n", "## Limits\n\nAbout 1.9 times as fast.\n"))
        with pytest.raises(ValueError, match=r"`About 1\.9 times as fast\.`"):
            card_files(folder, reports=reports(folder))

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ('{{ config.quote("no.such") }}', r"config\.json.*no\.such"),
            ('{{ stated.quote("conversations") }}', "stated"),  # not a measurement: in `training` only
            ('{{ config.quote("block_size", "9>3") }}', "a form is like"),
            ('{{ config.quote("block_size") | replace("4", "9") }}', "replace"),
            ('Of {{ config.at("hidden_size") }} channels.', r"nothing else of Jinja.*config\.at"),
            ("{{ '9.9' }}", "nothing else of Jinja"),
            ("{{ confg }}", "confg"),
            ("{% if %}", "summary"),
            ("{{ config._data }}", "summary"),
        ],
    )
    def test_what_cannot_be_quoted(self, folder, text, match):
        set_fact(folder, summary=text)
        with pytest.raises(ValueError, match=match):
            card_files(folder, reports=reports(folder))

    def test_a_report_of_an_earlier_release_makes_the_same_card(self, folder):
        path, text = folder.parent / "greedy.json", text_of(folder)
        report = path.read_text()
        for name, old in {"acceptance_length": "accepted_length", "acceptance_rate_by_": "acceptance_by_"}.items():
            assert name in report
            report = report.replace(name, old)
        path.write_text(report)
        assert text_of(folder) == text

    def test_names_may_have_digits(self, folder):
        set_fact(
            folder, name="Tiny-135M drafter 2.0", summary="For `Q4_1` and gsm8k.", citation="@misc{a, year = {2026}}"
        )
        text = text_of(folder)
        assert "# Tiny-135M drafter 2.0\n" in text
        assert "year = {2026}" in text.split("This drafter:")[1]


class TestContent:
    def test_sections(self, folder):
        text = text_of(folder)
        sections = [
            "Use",
            "Architecture",
            "Results",
            "Calibration",
            "Training",
            "Limits",
            "Provenance",
            "License",
            "Citation",
        ]
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == sections
        assert "On 12,345 conversations." in text
        assert "Made of 2 layers for tests." in text
        for limit in ("Thinking mode.** Trained with thinking off.", "Chat template", "Quantized targets", "Sampling"):
            assert limit in text.split("## Limits")[1]
        assert "It has seen letters only." in text
        for part in ("A processor", "64 cores", "threads: 48", "float32", "Greedy", "batches of 6", "0123456789ab"):
            assert part in text.split("## Results")[1]
        assert "python -m training.train --max_steps 100" in text.split("## Provenance")[1]

    def test_reports_give_a_table_each(self, folder):
        files = card_files(folder, reports=reports(folder, "greedy", "sampled-0.8", "latency"))
        text = files["README.md"].decode()
        titles = ["Greedy", "Sampled at temperature 0.8", "Speed", "3 threads", "5 threads"]
        assert re.findall(r"^### (.*)$", text, re.MULTILINE) == titles
        assert speed_tables(latency(folder)["sections"]) in text
        assert "with changes" in text.split("## Provenance")[1]
        plots = [name for name in files if name.endswith(".png")]
        assert plots == ["images/acceptance_greedy.png", "images/acceptance_sampled_0_8.png"]
        assert all(f"]({name})" in text for name in plots)

    def test_a_set_of_any_name(self, folder):
        def change(report):
            report["sets"]["a|b\nc"] = report["sets"].pop("letters")

        edit(folder.parent / "greedy.json", change)
        table = text_of(folder).split("### Greedy")[1].split("![")[0]
        rows = [line for line in table.splitlines() if line.startswith("|")]
        assert len(rows) == 5
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
        assert any("a\\|b c" in row for row in rows)

    def test_the_plot_shows_a_line_for_each_set_and_position(self, folder, tmp_path):
        (tmp_path / "plot.png").write_bytes(card_files(folder, reports=reports(folder))["images/acceptance.png"])
        pixels = imread(tmp_path / "plot.png")
        assert min(pixels.shape[:2]) > 400
        assert pixels[..., :3].std() > 0.05

    def test_without_confidence_head_or_speed(self, tmp_path):
        folder = tmp_path / "drafter"
        drafter = make_drafter(folder, enable_confidence_head=False, confidence_temperatures=None)
        (folder / "calibration.json").unlink()
        report = json.loads(evaluation(drafter, with_speed=False).to_json())
        for part in (*report["sets"].values(), report["pooled"]):
            part["calibration"] = part["thresholds"] = None
        (tmp_path / "greedy.json").write_text(json.dumps(report))
        text = text_of(folder)
        assert "no confidence head" in text.split("## Calibration")[1]
        assert "tok/s" not in text

    def test_only_a_latency_report(self, folder):
        files = card_files(folder, reports=reports(folder, "latency"))
        assert list(files) == ["README.md"]
        assert ModelCard(files["README.md"].decode()).data.eval_results is None


class TestMetadata:
    def test_header(self, folder):
        data = ModelCard(text_of(folder, "greedy", "sampled-0.8")).data
        assert (data.library_name, data.pipeline_tag, data.license) == (
            "transformers",
            "text-generation",
            "apache-2.0",
        )
        assert (data.base_model, data.to_dict()["base_model_relation"]) == ("org/tiny-target", "adapter")
        assert data.tags == ["dspark", "speculative-decoding", "custom_generate"]
        assert (data.language, data.datasets, data.model_name) == (["en"], ["org/answers"], "tiny-drafter")
        expected = [
            (name, round(part["acceptance"]["acceptance_length"], 4))
            for path in reports(folder, "greedy", "sampled-0.8")
            for name, part in json.loads(path.read_text())["sets"].items()
        ]
        found = [(result.dataset_config, result.metric_value) for result in data.eval_results]
        assert sorted(found) == sorted(expected)
        assert {result.metric_type for result in data.eval_results} == {"acceptance_length"}

    def test_eval_results_are_in_the_form_of_the_hub(self, folder):
        files = card_files(folder, reports=reports(folder, "greedy", "sampled-0.8"))
        names = [name for name in files if name.startswith(".eval_results/")]
        assert names == [f".eval_results/acceptance_length_{name}.yaml" for name in ("greedy", "sampled_0_8")]
        for name, path in zip(names, reports(folder, "greedy", "sampled-0.8"), strict=True):
            entries = parse_eval_result_entries(yaml.safe_load(files[name]))
            sets = json.loads(path.read_text())["sets"]
            assert [(entry.dataset_id, entry.task_id) for entry in entries] == [("org/prompts", each) for each in sets]
            lengths = [part["acceptance"]["acceptance_length"] for part in sets.values()]
            assert [entry.value for entry in entries] == pytest.approx(lengths, abs=5e-5)
            assert all("acceptance length" in entry.notes for entry in entries)
        assert parse_eval_result_entries(yaml.safe_load(files[names[0]]))[0].date == "2026-11-30T10:00:00+00:00"

    def test_no_results_for_a_benchmark_of_others(self, folder):
        set_fact(folder, benchmark="")
        assert not [name for name in card_files(folder, reports=reports(folder)) if name.startswith(".eval_results")]


class TestRefusals:
    @pytest.mark.parametrize("name", ["greedy", "latency"])
    def test_reports_of_another_drafter(self, folder, name):
        def change(report):
            report["drafter"] |= {"fingerprint": "0" * 16, "sha256": "0" * 64}

        edit(folder.parent / f"{name}.json", change)
        with pytest.raises(ValueError, match=rf"{name}\.json` is of another drafter"):
            card_files(folder, reports=reports(folder, name))

    def test_other_weights(self, folder):
        make_drafter(folder.parent / "more" / "drafter", markov_rank=4)
        with pytest.raises(ValueError, match="of another drafter"):
            card_files(folder.parent / "more" / "drafter", reports=reports(folder))

    @pytest.mark.parametrize(
        ("content", "match"),
        [
            ("{", "cannot be read as JSON"),
            ("[]", "not a report"),
            ('{"rounds": 1}', "not a report"),
            ('{"pooled": {}}', "not a report that can be quoted"),
            ('{"sections": [], "complete": true}', "was interrupted"),
            ('{"sections": [{}], "complete": false}', "was interrupted"),
        ],
    )
    def test_files_that_are_no_reports(self, folder, content, match):
        (folder.parent / "other.json").write_text(content)
        with pytest.raises(ValueError, match=match):
            card_files(folder, reports=reports(folder, "other"))

    def test_two_reports_of_one_name(self, folder):
        (folder.parent / "again").mkdir()
        shutil.copy(folder.parent / "greedy.json", folder.parent / "again" / "Greedy.json")
        with pytest.raises(ValueError, match=r"Greedy\.json.*rename the file"):
            card_files(folder, reports=reports(folder, "greedy", "again/Greedy"))

    def test_missing_files(self, folder):
        with pytest.raises(ValueError, match=r"no file.*absent\.json"):
            card_files(folder, reports=reports(folder, "absent"))
        with pytest.raises(ValueError, match="--report"):
            card_files(folder)
        (folder / "facts.yaml").unlink()
        with pytest.raises(ValueError, match=r"no facts file.*docs/guides/card\.md"):
            card_files(folder, reports=reports(folder))

    def test_temperatures_that_are_not_used(self, folder):
        edit(folder / "calibration.json", lambda content: content.update(temperatures=[1.0] * 4))
        with pytest.raises(ValueError, match=re.escape(f"config.json uses {TEMPERATURES}")):
            card_files(folder, reports=reports(folder))

    @pytest.mark.parametrize(
        ("fields", "match"),
        [
            ({"nmae": "x"}, r"unknown fields \['nmae'\]"),
            ({"name": ""}, "`name` must not be empty"),
            ({"license": 2}, "`license` must be a text"),
            ({"limits": "one"}, "`limits` must be a list"),
            ({"stated": [1]}, "`stated` must be a mapping"),
            ({"repo_id": "no-owner"}, "`repo_id` must be a Hub id"),
            ({"base_model": "/data/target"}, "`base_model` must be a Hub id"),
            ({"benchmark": "a/b/c"}, "`benchmark` must be a Hub id"),
            ({"limits": ["```\n1.9\n```"]}, "fenced"),
        ],
    )
    def test_facts(self, folder, fields, match):
        set_fact(folder, **fields)
        with pytest.raises(ValueError, match=rf"facts\.yaml.*{match}"):
            card_files(folder, reports=reports(folder))

    def test_facts_that_are_missing(self, folder):
        (folder / "facts.yaml").write_text("name: x\n")
        with pytest.raises(ValueError, match="lacks .*'repo_id'.*'thinking'"):
            card_files(folder, reports=reports(folder))


class TestCommand:
    def test_writes_and_lists(self, folder, tmp_path):
        runner = CliRunner()
        words = ["card", str(folder), "--report", str(tmp_path / "greedy.json")]
        result = runner.invoke(app, [*words, "--dry-run"])
        assert result.exit_code == 0
        assert "images/acceptance.png" in result.output
        assert not (folder / "README.md").exists()
        result = runner.invoke(app, [*words, "--output", str(tmp_path / "elsewhere" / "CARD.md")])
        assert result.exit_code == 0, result.output
        names = {path.relative_to(tmp_path / "elsewhere").as_posix() for path in (tmp_path / "elsewhere").rglob("*.*")}
        assert names >= {"CARD.md", "images/acceptance.png", ".eval_results/acceptance_length_greedy.yaml"}
        assert runner.invoke(app, words).exit_code == 0
        assert (folder / "README.md").read_bytes() == (tmp_path / "elsewhere" / "CARD.md").read_bytes()
        result = runner.invoke(app, ["card", str(folder)])
        assert result.exit_code == 2
        assert "Traceback" not in result.output

    def test_a_card_that_someone_wrote_is_kept(self, folder):
        (folder / "README.md").write_text("Mine.\n")
        with pytest.raises(ValueError, match="--overwrite"):
            write_card(folder, reports=reports(folder))
        assert (folder / "README.md").read_text() == "Mine.\n"
        write_card(folder, reports=reports(folder), overwrite=True)
        write_card(folder, reports=reports(folder))  # one's own is replaced

    def test_reports_named_by_the_facts_file(self, folder):
        set_fact(folder, reports=["../greedy.json"])
        assert card_files(folder) == card_files(folder, reports=reports(folder))


def test_the_example_of_the_guide_makes_a_card(folder):
    guide = (ROOT / "docs" / "guides" / "card.md").read_text()
    (folder / "facts.yaml").write_text(re.search(r"^```yaml\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)[1])
    text = text_of(folder)
    assert "Proposes 4 tokens at a time." in text
    assert "On 120,000 conversations" in text


class TestPackage:
    def test_the_card_of_a_package_is_made_of_its_facts(self, folder, tmp_path):
        set_fact(folder, reports=["../greedy.json"])
        package(folder, tmp_path / "out")
        made = card_files(folder)
        assert {name: (tmp_path / "out" / name).read_bytes() for name in made} == made
        assert not (tmp_path / "out" / "facts.yaml").exists()
        package(folder, tmp_path / "out", overwrite=True)

    def test_config_and_card_name_one_target(self, folder, tmp_path):
        """The card's, even where training wrote a folder into the config."""
        set_fact(folder, reports=["../greedy.json"])
        edit(folder / "config.json", lambda config: config.update(target_name_or_path=str(tmp_path)))
        package(folder, tmp_path / "out")
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["target_name_or_path"] == ModelCard.load(tmp_path / "out" / "README.md").data.base_model
        assert config["target_name_or_path"] == "org/tiny-target"
        with pytest.raises(ValueError, match="`target` is `org/other`, and `base_model` in .* `org/tiny-target`"):
            package(folder, tmp_path / "other", target_name="org/other")

    def test_an_edited_or_stale_card_is_refused(self, folder, tmp_path):
        set_fact(folder, reports=["../greedy.json"])
        write_card(folder)
        text = (folder / "README.md").read_text()
        (folder / "README.md").write_text(text.replace("| letters ", "| letters!"))
        with pytest.raises(ValueError, match=r"README\.md` is not what.*dspark card"):
            package(folder, tmp_path / "out")
        (folder / "README.md").write_text(text)
        edit(tmp_path / "greedy.json", lambda report: report["settings"].update(max_new_tokens=777))
        with pytest.raises(ValueError, match="or a report is newer"):
            package(folder, tmp_path / "out")

    def test_a_package_to_be_measured_has_no_card(self, folder, tmp_path):
        (folder / "facts.yaml").unlink()
        with pytest.raises(ValueError, match="no card.*--no-card"):
            package(folder, tmp_path / "out")
        package(folder, tmp_path / "out", with_card=False)
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert names >= {"config.json", "model.safetensors", "modeling_dspark.py", "files.json"}
        assert not names & {"README.md", "images", ".eval_results"}

    def test_reports_without_facts(self, folder, tmp_path):
        (folder / "facts.yaml").unlink()
        (folder / "README.md").write_text("A card.\n")
        with pytest.raises(ValueError, match="none"):
            package(folder, tmp_path / "out", reports=reports(folder))

    def test_the_snippets_run_as_they_stand(self, folder, tmp_path, tiny_tokenizer):
        """In a clean process, in a folder where the two Hub ids are local folders."""
        set_fact(folder, reports=["../greedy.json"])
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        edit(folder / "config.json", lambda config: config.update(chat_template_sha256=chat_template_hash(tokenizer)))
        package(folder, tmp_path / "org" / "tiny-drafter")
        tiny_target("llama").save_pretrained(tmp_path / "org" / "tiny-target")
        tokenizer.save_pretrained(tmp_path / "org" / "tiny-target")
        snippets = re.findall(r"^```python\n(.*?)^```$", text_of(folder), re.MULTILINE | re.DOTALL)
        assert len(snippets) == 3
        assert "apply_chat_template" in snippets[0]
        (tmp_path / "run.py").write_text("\n".join(snippets) + "print('calls', len(drafter.last_run.requests))\n")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {
            "HF_MODULES_CACHE": str(tmp_path / "modules"),
            "DSPARK_FUSED_HEAD": "torch",
            "HF_HUB_OFFLINE": "1",
        }
        environment |= {"DSPARK_CACHE": str(cache_with_kernels(tmp_path / "cache"))}
        command = [sys.executable, "-I", "run.py"]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
        assert "tokens per forward of the target" in result.stdout
        assert "calls 2" in result.stdout
