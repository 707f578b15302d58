"""The guide's one line loads a public checkpoint by its name: over real HTTP, from a double that has stand-ins under these names."""

import json
import os
import re
import subprocess
import sys

from tests.conftest import FIXTURES
from tests.docs.test_snippets import ROOT, blocks_of
from tests.hub_upload.conftest import hub  # noqa: F401
from tests.hub_upload.hub_double import READER


PAGE = ROOT / "docs" / "guides" / "convert.md"
STAND_INS = {
    "deepseek-ai/dspark_qwen3_4b_block7": FIXTURES / "a_vanilla_confM" / "draft",
    "mgoin/Qwen3-8B-speculator.dspark": FIXTURES / "d_full_anchor" / "draft",
}
GENERATE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
from modeling_dspark import DSparkModel

target = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
inputs = {"input_ids": torch.tensor([[5, 17, 40, 11]]), "max_new_tokens": 16, "do_sample": False}
texts = [target.generate(**inputs).tolist()]
for name in sys.argv[2:]:
    drafter = DSparkModel.from_pretrained(name)
    texts.append(target.generate(**inputs, assistant_model=drafter, num_assistant_tokens_schedule="fixed").tolist())
print(json.dumps({"bf16": str(bf16), "texts": texts}))
"""


def test_public_names_load_in_one_line(hub, tmp_path):  # noqa: F811
    for name, folder in STAND_INS.items():
        hub.store.create(name, private=False)
        hub.store.put(name, {path.name: path.read_bytes() for path in folder.iterdir()})
    first = next(block for block in blocks_of(PAGE) if block.language == "python")
    assert not first.runs
    assert re.findall(r'from_pretrained\("([^"]+)"', first.text) == list(STAND_INS)
    (tmp_path / "run.py").write_text(f"{first.text}\nbf16 = drafter.dtype\n{GENERATE}")
    environment = os.environ | hub.environment(tmp_path / "home", token=READER) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "run.py", str(FIXTURES / "target_qwen3"), *STAND_INS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["bf16"] == "torch.bfloat16"
    assert answer["texts"] == [answer["texts"][0]] * 3
    for name in STAND_INS:
        assert hub.count(f"^HEAD /{name}/resolve/main/model.safetensors") > 0
