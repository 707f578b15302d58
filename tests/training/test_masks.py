"""Assistant-token masks: where the chat template marks the answers, and where it does not."""

import json

import pytest
import torch

from training.common.targets import EMBEDDED_TARGET, load_tokenizer
from training.data.conversations import load_conversations
from training.data.masks import assistant_tokens


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "It is 1, \u00e9\u4f60."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2"},
]
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer():
    return load_tokenizer(EMBEDDED_TARGET)


def written(tokenizer, messages):
    ids, mask = assistant_tokens(tokenizer, messages)
    spans, texts = [], []
    for token, own in zip([*ids, None], [*mask, False], strict=True):
        if own:
            spans.append(token)
        elif spans:
            texts.append(tokenizer.decode(spans))
            spans = []
    return texts


def test_the_fallback_finds_what_a_marked_template_marks(tokenizer):
    """The shipped ChatML template has no marks; one that renders the same and has them gives the same mask."""
    assert "generation %}" not in tokenizer.chat_template
    fallback = assistant_tokens(tokenizer, MESSAGES)
    assert written(tokenizer, MESSAGES) == ["It is 1, \u00e9\u4f60.<|im_end|>", "2<|im_end|>"]
    tokenizer.chat_template = MARKED
    assert assistant_tokens(tokenizer, MESSAGES) == fallback


def test_a_conversation_without_answers(tokenizer):
    assert written(tokenizer, MESSAGES[:2]) == []


def test_an_answer_at_the_start(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    messages = [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "x"}]
    assert written(tokenizer, messages) == ["[assistant]Hi<|im_end|>"]


def test_a_template_that_forgets_is_refused(tokenizer):
    tokenizer.chat_template = MARKED.replace("{{ m.content }}", "{{ m.content if loop.last else '' }}", 1)
    tokenizer.chat_template = tokenizer.chat_template.replace("{% generation %}", "").replace(
        "{% endgeneration %}", ""
    )
    with pytest.raises(ValueError, match=r"message 2 differently.*\{% generation %\}"):
        assistant_tokens(tokenizer, MESSAGES)


def test_what_cannot_be_masked(tokenizer, tiny_tokenizer):
    with pytest.raises(ValueError, match="chat template"):
        assistant_tokens(tiny_tokenizer, MESSAGES)
    for wrong in ("text", [{"role": "user"}], ["text"]):
        with pytest.raises(ValueError, match="`messages` must be"):
            assistant_tokens(tokenizer, wrong)


def test_conversations_as_messages_are_trained_on(tokenizer, tmp_path):
    path = tmp_path / "conversations.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES}) + "\n" + json.dumps({"messages": MESSAGES[:3]}) + "\n")
    (long, short), counts = load_conversations("", [str(path)], tokenizer, max_length=512)
    ids, mask = assistant_tokens(tokenizer, MESSAGES)
    assert long.input_ids == tuple(ids)
    assert long.response_mask.tolist() == mask
    assert long.response_start == mask.index(True)
    assert int(short.response_mask.sum()) == len(tokenizer("It is 1, \u00e9\u4f60.<|im_end|>").input_ids)
    assert counts["cut"] == 0
    (cut, _), counts = load_conversations("", [str(path)], tokenizer, max_length=long.response_start + 3)
    assert int(cut.response_mask.sum()) == 3
    assert torch.equal(cut.response_mask, long.response_mask[: len(cut.input_ids)])
    assert counts == {"short_answers": 0, "long_prompts": 1, "cut": 2}
