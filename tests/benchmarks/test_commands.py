import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import demo, latency
from benchmarks.lib.breakdown import measure_breakdown
from benchmarks.lib.measure import ASSISTED, PLAIN
from hub_upload.package import package


ROOT = Path(__file__).resolve().parents[2]
PROMPT = [5, 6, 7, 8]
BLOCK = 3  # of the drafter in conftest.py


def test_a_breakdown_accounts_for_all_rounds_and_leaves_no_trace(pair, methods):
    pair.drafter.last_run = None
    before = [set(vars(owner)) for owner in (pair.target, pair.drafter)]
    hooks = len(pair.target._forward_hooks)
    report = measure_breakdown(pair, [PROMPT, PROMPT], methods, max_new_tokens=1 + 2 * (BLOCK + 1))
    assert [set(vars(owner)) for owner in (pair.target, pair.drafter)] == before
    assert len(pair.target._forward_hooks) == hooks
    assert report[PLAIN]["rounds"] == 2 * 2 * (BLOCK + 1)
    assert report[ASSISTED]["rounds"] == 2 * 2
    calls = {part: entry["calls"] for part, entry in report[ASSISTED]["parts"].items()}
    assert (calls["target forward"], calls["draft backbone"], calls["base logits"]) == (4, 4, 4)
    assert calls["heads and schedule"] == calls["acceptance"] == 4
    assert sum(entry["share"] for entry in report[ASSISTED]["parts"].values()) == pytest.approx(1, abs=1e-3)
    assert all(entry["ms_per_round"] > 0 for entry in report[ASSISTED]["parts"].values())


def test_a_latency_run_writes_its_report(pair, prompts_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(latency, "load_pair", lambda *arguments: pair)
    output = tmp_path / "results" / "latency.json"
    options = ["--prompts", str(prompts_file), "--max-new-tokens", "9", "--repeats", "2", "--dtype", "float32"]
    options += ["--threads", "1", "2", "--peer", "prompt_lookup", "--breakdown", "--output", str(output)]
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)  # two real ones would spin on a busy machine
    assert latency.main(options) == 0
    assert threads == [1, 2, torch.get_num_threads()]
    report = json.loads(output.read_text())
    assert report["complete"] is True
    assert [section["threads"] for section in report["sections"]] == [1, 2]
    section = report["sections"][0]
    entry, overall = section["sets"]["gsm8k"], section["overall"]
    speeds = entry["tokens_per_second"]
    assert list(speeds) == [PLAIN, ASSISTED, "prompt_lookup"]
    assert entry["ratio"][ASSISTED] == pytest.approx(speeds[ASSISTED] / speeds[PLAIN], rel=1e-2)
    assert entry["new_tokens"] == {PLAIN: 18, ASSISTED: 18, "prompt_lookup": 18}
    assert (entry["tau"], entry["acceptance_rate_by_position"]) == (BLOCK + 1, [1.0] * BLOCK)
    ratios = [of_set["ratio"][ASSISTED] for of_set in section["sets"].values()]
    assert overall["geometric_mean_ratio"][ASSISTED] == pytest.approx((ratios[0] * ratios[1]) ** 0.5, rel=1e-3)
    assert overall["min_ratio"][ASSISTED] == min(ratios)
    assert overall["differences"] == {"count": 0, "largest_logit_gap": None}
    assert set(section["breakdown"]) == {PLAIN, ASSISTED}
    assert "### 2 threads" in capsys.readouterr().out


def test_an_interrupted_latency_run_keeps_what_is_complete(pair, prompts_file, tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "load_pair", lambda *arguments: pair)
    original, calls = latency.measure_set, []

    def measure_set(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments, **keywords)

    monkeypatch.setattr(latency, "measure_set", measure_set)
    output = tmp_path / "latency.json"
    options = ["--prompts", str(prompts_file), "--max-new-tokens", "5", "--repeats", "1", "--output", str(output)]
    assert latency.main(options) == 130
    assert not output.exists()
    report = json.loads((tmp_path / "latency.partial.json").read_text())
    assert report["complete"] is False
    assert list(report["sections"][0]["sets"]) == ["gsm8k"]


def test_an_interrupted_demo_sums_up_what_it_knows(pair, methods, monkeypatch, capsys):
    monkeypatch.setattr(demo, "start", lambda options, prompts: (pair, methods))
    original, calls = demo.show_prompt, []

    def show_prompt(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments, **keywords)

    monkeypatch.setattr(demo, "show_prompt", show_prompt)
    assert demo.main(["--prompt", "w5", "--prompt", "w6", "--max-new-tokens", "5"]) == 130
    output = capsys.readouterr().out
    assert "Interrupted after 1 of 2 prompts" in output
    assert "geometric mean over 1 prompt)" in output


def test_the_demo_runs_on_a_packaged_drafter_without_importing_the_package(target, drafter, tokenizer, tmp_path):
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    (tmp_path / "drafter" / "README.md").write_text("# A test drafter\n")
    package(tmp_path / "drafter", tmp_path / "build" / "drafter")
    program = (
        "import sys; from benchmarks.demo import main; status = main(sys.argv[1:]); "
        "sys.exit('modeling_dspark was imported' if 'modeling_dspark' in sys.modules else status)"
    )
    options = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "build" / "drafter")]
    options += ["--dtype", "float32", "--max-new-tokens", "9", "--threads", "1", "--prompt", "w5 w6", "--prompt", "w9"]
    result = subprocess.run(
        [sys.executable, "-c", program, *options],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "identical outputs: 2 of 2 (float32)" in result.stdout
    assert f"acceptance rate by position: {' '.join(['1.00'] * BLOCK)}" in result.stdout
    assert "[2/2] yours: w9" in result.stdout
