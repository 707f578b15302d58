import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.lib import machine
from benchmarks.lib.measure import ASSISTED, PLAIN
from benchmarks.lib.pair import Pair
from modeling_dspark import DSparkConfig, DSparkModel


VOCAB, HIDDEN, BLOCK = 199, 64, 3
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}assistant"


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """Commands take no reading of the machine that runs the tests, which may well be busy."""
    monkeypatch.setattr(machine, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(machine, "BUSY_CORES_PER_CORE", float("inf"))


@pytest.fixture
def target():
    """A random target whose next token depends on the last token alone, so that a drafter can be right by construction."""
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": None}
    config = Qwen3Config(
        vocab_size=VOCAB, num_hidden_layers=5, head_dim=16, tie_word_embeddings=False, **sizes, **special
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


@pytest.fixture
def drafter(target):
    """Drafts exactly what the target would say: the Markov head is the target, the backbone adds nothing."""
    config = DSparkConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        target_layer_ids=[0, 2],
        num_target_layers=5,
        mask_token_id=VOCAB - 1,
        markov_rank=HIDDEN,
        block_size=BLOCK,
        pad_token_id=0,
    )
    model = DSparkModel(config).eval()
    with torch.no_grad():
        model.norm.weight.zero_()
        embedded = target.model.embed_tokens.weight
        model.markov_head.markov_w1.weight.copy_(target.model.norm(embedded))
        model.markov_head.markov_w2.weight.copy_(target.lm_head.weight)
    return model


@pytest.fixture
def tokenizer():
    words = ["<unk>", "user", "assistant", *(f"w{index}" for index in range(VOCAB - 3))]
    model = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="<unk>", pad_token="<unk>", chat_template=TEMPLATE
    )


@pytest.fixture
def pair(target, drafter, tokenizer):
    return Pair(target, drafter, tokenizer)


@pytest.fixture
def methods(drafter):
    return {PLAIN: {}, ASSISTED: {"assistant_model": drafter}}


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    records = [{"turns": [f"w{index} w7"], "source": source} for index in range(2) for source in ("gsm8k", "mbpp")]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
