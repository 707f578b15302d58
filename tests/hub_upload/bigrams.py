"""A pair whose rounds can be worked out by hand: the drafter's next token depends on the one before it alone.

Its backbone contributes nothing (the final norm is zero) and its head is a table, so a block is the chain of the table from
the last token. How much of it is kept follows from the target's own greedy text, which plain `generate` gives.
"""

import json
from collections import Counter
from itertools import pairwise

import torch

from tests.builders import VOCAB, tiny_drafter, tiny_target


BLOCK, NEW_TOKENS = 4, 24
SETS = {
    "alpha": ["ab", "Kq", "zZ9", "hello", "Mn", "o7"],
    "beta": ["ff", "1kVZ", "2tqMnMc", "RkBOzZ", "3G8xI7C", "r5c3bx"],
}


def make_pair(tokenizer):
    """The target, the drafter, and the target's greedy answers by set."""
    target = tiny_target("llama")
    target.generation_config.eos_token_id = None
    texts = {name: [answer(target, tokenizer, prompt) for prompt in prompts] for name, prompts in SETS.items()}
    follows = [Counter() for _ in range(VOCAB)]
    for text in (text for each in texts.values() for text in each):
        for one, other in pairwise(text):
            follows[one][other] += 1
    table = [counter.most_common(1)[0][0] if counter else 0 for counter in follows]
    drafter = tiny_drafter(target, block_size=BLOCK, markov_rank=VOCAB, eos_token_id=None)
    with torch.no_grad():
        drafter.norm.weight.zero_()
        drafter.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB))
        drafter.markov_head.markov_w2.weight.copy_(20 * torch.eye(VOCAB)[table].T)
    return target, drafter, table, texts


def answer(target, tokenizer, prompt):
    ids = torch.tensor([tokenizer(prompt).input_ids])
    output = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    return output[0, ids.shape[1] :].tolist()


def count_rounds(text, table):
    """Tokens of each round by hand: the first token is the prefill's; no block reaches past the end, and the bonus token is last."""
    tokens, at = [], 0
    while at < len(text) - 1:
        room = min(BLOCK, len(text) - at - 2)
        kept, last = 0, table[text[at]]
        while kept < room and last == text[at + 1 + kept]:
            kept, last = kept + 1, table[last]
        tokens.append(kept + 1)
        at += kept + 1
    return tokens


def card_of(texts, table):
    """A card whose metadata have the acceptance lengths counted by hand, as `hub_upload card` writes them."""
    results = []
    for name, answers in texts.items():
        counted = [count_rounds(text, table) for text in answers]
        tau = sum(sum(each) for each in counted) / sum(map(len, counted))
        metric = {"type": "acceptance_length", "value": round(tau, 4), "name": "Acceptance length (tau), greedy"}
        dataset = {"name": name, "type": "org/prompts", "config": name}
        results.append({"task": {"type": "text-generation"}, "dataset": dataset, "metrics": [metric]})
    index = json.dumps([{"name": "tiny", "results": results}])
    return f"---\nlibrary_name: transformers\nmodel-index: {index}\n---\n\nA card.\n"
