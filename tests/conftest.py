"""Tiny random targets and drafters, built in the test: nothing is downloaded."""

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from modeling_dspark import CostProfile, DSparkModel, engine_profile
from modeling_dspark.schedule_costs import Curve


FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fake_costs(monkeypatch, tmp_path):
    """Costs that are the same everywhere, in which drafting pays; no test touches the user's folder of profiles."""
    verify, draft = Curve([1, 101], [1.0, 3.0]), Curve([1, 33], [0.1, 0.2])
    position, accept = Curve([1], [0.005]), Curve([1], [0.02])
    costs = CostProfile(verify, 1e-6, draft, draft, position, position, accept, accept)
    monkeypatch.setattr(engine_profile, "measure", lambda *_, **__: costs)
    monkeypatch.setattr(engine_profile, "costs_folder", lambda: tmp_path / "costs")
    return costs


@pytest.fixture(scope="session")
def golden_target():
    return AutoModelForCausalLM.from_pretrained(FIXTURES / "target_qwen3").eval()


@pytest.fixture(scope="session")
def golden_drafter():
    return DSparkModel.from_pretrained(FIXTURES / "a_vanilla_confM" / "draft").eval()


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """A byte-level tokenizer of one character a token, over the tiny vocabulary."""
    import string

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = "!?#" + string.ascii_letters + string.digits
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(characters[:61])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="!", bos_token="?", eos_token="#")
