"""A pair whose rounds can be worked out by hand: the drafter's next token depends on the one before it alone.

Its backbone contributes nothing (the final norm is zero) and its head is a table, so a block is the chain of the table from
the last token. How much of it is kept follows from the target's own greedy text, which plain `generate` gives.
"""

import json
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import torch

from tests.builders import VOCAB, tiny_drafter, tiny_target


BLOCK, NEW_TOKENS = 4, 24
SETS = {"alpha": ["ab", "Kq", "zZ9", "hello", "Mn", "o7"], "beta": ["x", "3wE", "pqr", "TT", "vLm", "c4"]}


@dataclass(frozen=True)
class Counted:
    """Rounds of a prompt: drafts kept in each, and tokens of each."""

    kept: list[int]
    tried: list[int]
    tokens: list[int]


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
    """Rounds by hand: the first token is the prefill's; a block never reaches past the end, which the bonus token takes."""
    counted = Counted([], [], [])
    at = 0
    while at < len(text) - 1:
        room = min(BLOCK, len(text) - at - 2)
        drafts, last = [], text[at]
        for _ in range(room):
            last = table[last]
            drafts.append(last)
        kept = 0
        while kept < room and drafts[kept] == text[at + 1 + kept]:
            kept += 1
        counted.kept.append(kept)
        counted.tried.append(room)
        counted.tokens.append(kept + 1)
        at += kept + 1
    return counted


def row_of(name, counted):
    """A row of a card's table."""
    rounds = sum(len(each.tokens) for each in counted)
    tau = sum(sum(each.tokens) for each in counted) / rounds
    shares = []
    for position in range(BLOCK):
        pairs = [(k, t) for each in counted for k, t in zip(each.kept, each.tried, strict=True)]
        tried = sum(t > position and k >= position for k, t in pairs)
        shares.append(f"{sum(k > position for k, _ in pairs) / tried:.2f}" if tried else "-")
    return f"| {name} | {len(counted)} | {rounds} | {tau:.2f} | 4.00 | 50.0% | {' '.join(shares)} |", tau


def card_of(texts, table):
    """A card with what was counted by hand, in the form of `hub_upload card`."""
    counted = {name: [count_rounds(text, table) for text in each] for name, each in texts.items()}
    counted["pooled"] = [each for part in counted.values() for each in part]
    rows = {name: row_of(name, each) for name, each in counted.items()}
    results = [
        {
            "task": {"type": "text-generation"},
            "dataset": {"name": name, "type": "org/prompts", "config": name},
            "metrics": [
                {"type": "acceptance_length", "value": round(tau, 4), "name": "Accepted length (tau), greedy"}
            ],
        }
        for name, (_, tau) in rows.items()
        if name != "pooled"
    ]
    index = json.dumps([{"name": "tiny", "results": results}])
    header = "| set | prompts | rounds | accepted length | drafts a round | verify rate | acceptance by position |"
    table = "\n".join([header, "|---|---|---|---|---|---|---|", *(row for row, _ in rows.values())])
    return f"---\nlibrary_name: transformers\nmodel-index: {index}\n---\n\n## Results\n\n### Greedy\n\n{table}\n\n### Speed\n"
