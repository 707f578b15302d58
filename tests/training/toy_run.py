"""A training run at toy size: a tiny target, prompts and answers in a folder, and the flags that train on them."""

import json

import torch

from tests.builders import VOCAB, tiny_target


def write_inputs(folder, tokenizer, *, count=24, family="llama"):
    """Target, tokenizer, prompts and random answers; the answers are of several lengths."""
    target = tiny_target(family)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    texts = ["abc def"[: 3 + index % 4] for index in range(count)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    generator = torch.Generator().manual_seed(0)
    answers = [torch.randint(4, VOCAB, (6 + index % 5,), generator=generator).tolist() for index in range(count)]
    write_answers(folder, answers)
    return target


def write_answers(folder, answers):
    lines = [json.dumps({"prompt": index, "answer_ids": ids}) + "\n" for index, ids in enumerate(answers)]
    (folder / "answers.jsonl").write_text("".join(lines))


def flags(folder, output, **changes):
    """Command-line words of a run; `None` leaves a flag out."""
    values = {
        "target": folder / "target",
        "target_dtype": "float32",
        "prompts": folder / "prompts.jsonl",
        "answers": folder / "answers.jsonl",
        "output_dir": folder / output,
        "num_draft_layers": 1,
        "block_size": 3,
        "target_layer_ids": "0 2",
        "mask_token_id": 3,
        "markov_rank": 4,
        "num_anchors": 4,
        "num_eval_conversations": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "use_cpu": "true",
        "report_to": "none",
        "logging_steps": 1,
        "max_steps": 4,
        "save_strategy": "no",
        "seed": 3,
    }
    words = []
    for name, value in (values | changes).items():
        words += [] if value is None else [f"--{name}", *str(value).split(" ")]
    return words
