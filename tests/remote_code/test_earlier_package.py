"""A drafter packaged by release 0.1 still loads and drafts the same, alone and beside one packaged by this code."""

import json
import subprocess
import sys
import zipfile

import pytest

from hub_upload.package.package import package
from modeling_dspark import DSparkModel
from tests.builders import cache_with_kernels
from tests.conftest import FIXTURES


CODE = """
import json, sys, torch
from transformers import AutoModel, AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
inputs = {"input_ids": torch.tensor([[5, 17, 40, 11], [9, 33, 8, 21]]), "max_new_tokens": 24, "do_sample": False}
inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
plain = target.generate(**inputs).tolist()
runs = []
for folder in sys.argv[2:]:
    drafter = AutoModel.from_pretrained(folder, trust_remote_code=True)
    text = target.generate(**inputs, assistant_model=drafter, num_assistant_tokens_schedule="fixed").tolist()
    file = sys.modules[type(drafter).__module__].__file__
    runs.append({"text": text, "accepted": drafter.last_run.accepted, "verified": drafter.last_run.verified, "file": file})
print(json.dumps({"plain": plain, "runs": runs, "imported": "modeling_dspark" in sys.modules}))
"""


@pytest.mark.parametrize("order", [["earlier"], ["earlier", "now"], ["now", "earlier"]], ids=" then ".join)
def test_texts_and_rounds_are_equal(tmp_path, order):
    with zipfile.ZipFile(FIXTURES / "packaged_0_1_0.zip") as archive:
        archive.extractall(tmp_path / "earlier")
    source = tmp_path / "source"
    DSparkModel.from_pretrained(FIXTURES / "a_vanilla_confM" / "draft").save_pretrained(source)
    for path in source.glob("*.py"):
        path.unlink()
    package(source, tmp_path / "now", with_card=False)
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    environment |= {"DSPARK_CACHE": str(cache_with_kernels(tmp_path / "cache"))}
    result = subprocess.run(
        [sys.executable, "-c", CODE, str(FIXTURES / "target_qwen3"), *(str(tmp_path / name) for name in order)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    answer = json.loads(result.stdout.splitlines()[-1])
    assert not answer["imported"]
    assert [run["text"] for run in answer["runs"]] == [answer["plain"]] * len(order)
    assert all(run["accepted"] == answer["runs"][0]["accepted"] for run in answer["runs"])
    assert sum(answer["runs"][0]["accepted"]) > 0
    assert len({run["file"] for run in answer["runs"]}) == len(order)
