"""Every cross-field mistake is a `ValueError` at construction that names the field."""

import pytest

from modeling_dspark import DSparkConfig


GOOD = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "target_layer_ids": [0, 2],
    "num_target_layers": 4,
    "mask_token_id": 3,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_layer_ids", []),
        ("target_layer_ids", [2, 0]),
        ("target_layer_ids", [0, 0]),
        ("target_layer_ids", [-2, 0]),
        ("target_layer_ids", [0, 4]),
        ("target_layer_ids", [0, 3]),
        ("mask_token_id", 61),
        ("mask_token_id", -1),
        ("block_size", 0),
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("markov_rank", -1),
        ("markov_rank", 0),
        ("markov_head_type", "gru"),
        ("confidence_temperatures", [1.0]),
        ("confidence_temperatures", [1.0] * 6 + [0.0]),
        ("confidence_temperatures", [float("nan")] * 7),
        ("hidden_act", "bogus"),
        ("draft_vocab_size", 62),
        ("draft_vocab_size", 0),
        ("default_num_assistant_tokens", 0),
        ("default_assistant_confidence_threshold", 1.5),
        ("default_num_assistant_tokens_schedule", "constant"),
    ],
)
def test_mistakes_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        DSparkConfig(**(GOOD | {field: value}))


def test_combinations():
    with pytest.raises(ValueError, match="markov_head_type.*rnn"):
        DSparkConfig(**GOOD, markov_rank=0, markov_head_type="rnn", confidence_head_with_markov=False)
    with pytest.raises(ValueError, match="enable_confidence_head"):
        DSparkConfig(**GOOD, enable_confidence_head=False, confidence_temperatures=[1.0] * 7)


@pytest.mark.parametrize("field", ["block_size", "vocab_size", "markov_rank"])
def test_wrong_types_are_named(field):
    with pytest.raises(Exception, match=f"{field}.*expected int"):
        DSparkConfig(**(GOOD | {field: "a"}))


def test_what_is_valid():
    assert DSparkConfig(**(GOOD | {"target_layer_ids": [-1, 2]})).target_layer_ids == [-1, 2]
    config = DSparkConfig(
        **GOOD,
        markov_rank=0,
        confidence_head_with_markov=False,
        rope_parameters={"rope_type": "default", "rope_theta": 5.0},
    )
    assert config.head_dim == 8
    assert config.num_key_value_heads == 4


def test_round_trip(tmp_path):
    config = DSparkConfig(**GOOD, confidence_temperatures=[1.5] * 7, draft_vocab_size=10, eos_token_id=[1, 2])
    config.save_pretrained(tmp_path)
    assert DSparkConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
