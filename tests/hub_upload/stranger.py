"""What somebody does who has only read the card, in a process that has never seen this project. Prints JSON.

python -E stranger.py REPOSITORY TARGET REVISION [other REPOSITORY or REVISION to try, as NAME@REVISION]...
"""

import json
import sys

import torch
from transformers import AutoModel, AutoModelForCausalLM


def main(repository, target, revision, *others):
    target = AutoModelForCausalLM.from_pretrained(target).eval()
    drafter = AutoModel.from_pretrained(repository, revision=revision, trust_remote_code=True)
    ids = torch.tensor([[5, 17, 40, 11], [9, 33, 8, 21]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    settings = {"assistant_model": drafter, "num_assistant_tokens_schedule": "fixed"}
    errors = {}
    for other in others:
        name, _, wanted = other.partition("@")
        try:
            AutoModel.from_pretrained(name, revision=wanted, trust_remote_code=True)
        except Exception as error:
            errors[other] = f"{type(error).__name__}: {error}"
    answer = {
        "plain": target.generate(**inputs).tolist(),
        "assisted": target.generate(**inputs, **settings).tolist(),
        "module": type(drafter).__module__,
        "imported": "modeling_dspark" in sys.modules,
        "errors": errors,
    }
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
