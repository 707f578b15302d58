"""The commands for vLLM and SGLang parse, have flags and keys that those have, and our files keep SGLang's rules.

No server runs here. The lists are what the sources that the page names have: SGLang 0.5.23, vLLM's `SpeculativeConfig`.
"""

import json
import shlex
from pathlib import Path

import pytest

from modeling_dspark import CostProfile
from tests.docs.test_snippets import ROOT, blocks_of, commands_of


PAGE = ROOT / "docs" / "guides" / "serve_elsewhere.md"
SHIPPED = ROOT / "hub_upload" / "repos" / "dspark-smollm2-135m-instruct"
VLLM_KEYS = {
    *(
        "method",
        "model",
        "num_speculative_tokens",
        "draft_tensor_parallel_size",
        "draft_sample_method",
        "max_model_len",
    ),
    *("attention_backend", "enable_adaptive_verification", "rejection_sample_method", "quantization", "revision"),
}
VLLM_FLAGS = {"--speculative-config"}
SGLANG_FLAGS = {
    *("--model-path", "--speculative-algorithm", "--speculative-draft-model-path", "--pp-size"),
    *("--speculative-dspark-block-size", "--speculative-dspark-sps-table-path", "--max-running-requests"),
    *("--speculative-dspark-confidence-sts-path", "--speculative-num-draft-tokens"),
}
PROFILER_FLAGS = {"--base-url", "--max-batch-size", "--out", "--no-plot"}
ENVIRONMENT = {
    "SGLANG_RAGGED_VERIFY_MODE": {"static", "compact", "cap-accept"},
    "SGLANG_DSPARK_ENABLE_SPS_RECORD": {"1"},
    "SGLANG_SIMULATE_ACC_LEN": {"1.0"},
}


def words_of(command):
    """Settings of the environment, and the other words."""
    words = shlex.split(command)
    settings = {}
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        settings[name] = value
    return settings, words


def flags_of(words):
    return {word.split("=")[0] for word in words if word.startswith("--")}


def served():
    return [command for command in commands_of(PAGE) if command.strip() and not command.startswith("#")]


@pytest.mark.parametrize("command", [each for each in served() if each.startswith("vllm ")])
def test_vllm(command):
    _, words = words_of(command)
    assert words[:2] == ["vllm", "serve"]
    assert flags_of(words) <= VLLM_FLAGS
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert set(config) <= VLLM_KEYS
    assert config["method"] == "dspark"
    assert config["num_speculative_tokens"] == 7
    assert config.get("draft_sample_method", "greedy") in {"greedy", "probabilistic"}


@pytest.mark.parametrize("command", [each for each in served() if "sglang" in each])
def test_sglang(command):
    settings, words = words_of(command)
    assert all(value in ENVIRONMENT[name] for name, value in settings.items())
    module = words[words.index("-m") + 1]
    if module == "sglang.benchmark.dspark_sps_profiler":
        assert flags_of(words) <= PROFILER_FLAGS
        return
    assert module == "sglang.launch_server"
    assert flags_of(words) <= SGLANG_FLAGS
    assert words[words.index("--speculative-algorithm") + 1] == "DSPARK"


def test_the_server_that_is_profiled():
    """What the profiler of 0.5.23 asks of the server before it measures anything."""
    commands = served()
    profiler = next(number for number, command in enumerate(commands) if "dspark_sps_profiler" in command)
    settings, _ = words_of(commands[profiler - 1])
    wanted = {"RAGGED_VERIFY_MODE": "static", "DSPARK_ENABLE_SPS_RECORD": "1", "SIMULATE_ACC_LEN": "1.0"}
    assert settings == {f"SGLANG_{name}": value for name, value in wanted.items()}


def test_every_command_of_the_page_is_checked():
    assert len(served()) == 7
    assert all(command.startswith("vllm ") or "sglang" in command for command in served())


def check_calibration(content, num_draft_positions=None):
    assert set(content) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    assert all(value > 0 for value in content["temperatures"])
    assert num_draft_positions in (None, len(content["temperatures"]))
    assert isinstance(content["num_samples"], int)


def check_costs(content):
    assert set(content) == {"sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"}
    assert content["sample_batch_tokens"] == sorted(set(content["sample_batch_tokens"]))
    assert len(content["sample_batch_tokens"]) == len(content["sample_steps_per_sec"])
    assert content["max_batch_tokens"] >= content["sample_batch_tokens"][-1]
    assert all(rate > 0 for rate in content["sample_steps_per_sec"])


def test_json_of_the_page():
    calibration, costs = (json.loads(block.text) for block in blocks_of(PAGE) if block.language == "json")
    check_calibration(calibration)
    check_costs(costs)


def test_files_of_ours_keep_the_rules_of_sglang(tmp_path):
    config = json.loads((SHIPPED / "config.json").read_text())
    check_calibration(json.loads((SHIPPED / "calibration.json").read_text()), config["block_size"])
    profile = CostProfile.load(ROOT / "benchmarks" / "results" / "costs.json")
    check_costs(profile.to_sglang(config["block_size"]))
    additive = {"bias_seconds": 0.1, "bs_probes": [1], "alpha_seconds": [0.1], "m_probes": [1], "theta_seconds": [0.1]}
    path = Path(tmp_path / "additive.json")
    path.write_text(json.dumps(additive))
    with pytest.raises(ValueError, match="not a cost profile"):
        CostProfile.load(path)
