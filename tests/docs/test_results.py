"""The numbers that README and the model card quote are those of the committed measurement."""

import json
from pathlib import Path

import pytest

from benchmarks.report import speed_tables
from benchmarks.throughput_summary import throughput_table


ROOT = Path(__file__).parents[2]
CARD = Path("hub_upload") / "repos" / "dspark-smollm2-135m-instruct" / "README.md"


@pytest.mark.parametrize("page", [Path("README.md"), CARD], ids=str)
def test_quoted_tables(page):
    report = json.loads((ROOT / "benchmarks" / "results" / "latency.json").read_text())
    assert speed_tables(report["sections"]) in (ROOT / page).read_text()


def test_the_measurement_is_of_the_shipped_drafter():
    import hashlib

    report = json.loads((ROOT / "benchmarks" / "results" / "latency.json").read_text())
    weights = (ROOT / CARD.parent / "model.safetensors").read_bytes()
    assert report["drafter"]["sha256"] == hashlib.sha256(weights).hexdigest()


@pytest.mark.parametrize("page", [Path("README.md"), Path("docs") / "batching.md"], ids=str)
def test_quoted_throughput(page):
    report = json.loads((ROOT / "benchmarks" / "results" / "throughput.json").read_text())
    assert throughput_table(report) in (ROOT / page).read_text()
    assert [level["concurrency"] for level in report["levels"]] == [1, 2, 4, 8, 16, 32]
