"""The embedded target with the shipped drafter, as remote code in a process of its own (`benchmarks.equality`).

The full comparison (102 prompts of 64 tokens) is `python -m benchmarks.equality`, whose result is committed as
`benchmarks/results/equality.json`.
"""

import hashlib
import json
from pathlib import Path

import pytest

from benchmarks.equality import main as compare
from hub_upload.package import package


ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "hub_upload" / "repos" / "dspark-smollm2-135m-instruct"


def run(tmp_path, *options):
    package(SHIPPED, tmp_path / "package")
    output = tmp_path / "equality.json"
    code = compare(["--drafter", str(tmp_path / "package"), "--output", str(output), *options])
    return code, json.loads(output.read_text())


def test_a_few_prompts(tmp_path):
    code, report = run(tmp_path, "--limit", "4", "--batch-size", "2", "--max-new-tokens", "20")
    assert code == 0
    assert report["num_equal"] == 4
    assert any(prompt["rounds"] < prompt["new_tokens"] - 1 for prompt in report["prompts"])  # drafts were accepted


@pytest.mark.slow
def test_all_prompts(tmp_path):
    code, report = run(tmp_path)
    assert code == 0
    assert report["num_equal"] == len(report["prompts"]) >= 100


def test_the_committed_comparison_is_of_the_shipped_drafter():
    report = json.loads((ROOT / "benchmarks" / "results" / "equality.json").read_text())
    weights = (SHIPPED / "model.safetensors").read_bytes()
    assert report["drafter"]["sha256"] == hashlib.sha256(weights).hexdigest()
    assert report["num_equal"] == len(report["prompts"]) >= 100
    assert report["max_new_tokens"] == 64


def test_the_shipped_drafter_is_small():
    assert (SHIPPED / "model.safetensors").stat().st_size <= 25_000_000
