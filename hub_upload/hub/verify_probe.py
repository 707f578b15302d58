"""Runs in a process of its own: loads a drafter with the code that came with it, and decodes with it and without.

    python -E verify_probe.py REQUEST.json ANSWER.json

It imports torch, transformers and tqdm only, so that no other copy of the drafter's code can take part. It judges nothing:
texts, forwards of the target, and where the code came from go into the answer.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModel, AutoModelForCausalLM
from transformers.utils import logging


def main(request: Path, answer: Path) -> None:
    """Answer a request; both are JSON files."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    wanted = json.loads(request.read_text(encoding="utf-8"))
    target = AutoModelForCausalLM.from_pretrained(wanted["target"], dtype=torch.float32).to(wanted["device"]).eval()
    pinned = {"revision": wanted["revision"]} if wanted["revision"] else {}
    drafter: Any = AutoModel.from_pretrained(wanted["drafter"], trust_remote_code=True, dtype=torch.float32, **pinned)
    drafter.to(wanted["device"]).eval()
    calls = [0]
    target.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    settings = {"assistant_model": drafter, "num_assistant_tokens_schedule": "fixed"}
    _decode(
        target, wanted["prompts"][0], 2, **settings
    )  # the first call also finds out whether the target can be packed
    answers: list[dict[str, Any]] = []
    for prompt in tqdm(wanted["prompts"], unit="prompt", desc="plain and assisted"):
        plain = _decode(target, prompt, wanted["max_new_tokens"])
        calls[0] = 0
        assisted = _decode(target, prompt, wanted["max_new_tokens"], **settings)
        answers.append({"plain": plain, "assisted": assisted, "forwards": calls[0]})
    kind = type(drafter)
    module = sys.modules[kind.__module__]
    report = {
        "prompts": answers,
        "class": f"{kind.__module__}.{kind.__name__}",
        "code": str(Path(str(module.__file__)).parent),
        "weights": digest(drafter),
        "others": sorted(name for name in sys.modules if name.split(".")[0] == "modeling_dspark"),
    }
    answer.write_text(json.dumps(report), encoding="utf-8")


def digest(model: torch.nn.Module) -> str:
    """A hash of all tensors of a model, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _decode(target: Any, prompt: list[int], max_new_tokens: int, **settings: Any) -> list[int]:
    input_ids = torch.tensor([prompt], device=target.device)
    output = target.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        **settings,
    )
    return output[0, len(prompt) :].tolist()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
