"""Runs in a process of its own: loads a drafter with the code that came with it, and decodes with it and without.

    python -E verify_probe.py REQUEST.json ANSWER.json

It imports torch and transformers only, so that no other copy of the drafter's code can take part, and judges nothing: what
it saw goes into the answer. The rounds are the forwards of the target, counted here and not by the drafter.
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
    asked = json.loads(request.read_text(encoding="utf-8"))
    target = AutoModelForCausalLM.from_pretrained(asked["target"], dtype=torch.float32).to(asked["device"]).eval()
    pinned = {"revision": asked["revision"]} if asked["revision"] else {}
    drafter: Any = AutoModel.from_pretrained(asked["drafter"], trust_remote_code=True, dtype=torch.float32, **pinned)
    drafter.to(asked["device"]).eval()
    calls = [0]
    target.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    settings = {"assistant_model": drafter, "num_assistant_tokens_schedule": "fixed"}
    _decode(target, asked["prompts"][0], 2, **settings)  # the first call also tries whether the target can be packed
    seen: list[dict[str, Any]] = []
    for prompt in tqdm(asked["prompts"], unit="prompt", desc="plain and assisted"):
        plain = _decode(target, prompt, asked["max_new_tokens"])
        calls[0] = 0
        assisted = _decode(target, prompt, asked["max_new_tokens"], **settings)
        run = drafter.last_run.requests[0]
        rounds = {name: list(getattr(run, name)) for name in ("verified", "accepted", "new_tokens")}
        seen.append({"plain": plain, "assisted": assisted, "forwards": calls[0], "rounds": rounds})
    kind = type(drafter)
    module = sys.modules[kind.__module__]
    written = {
        "prompts": seen,
        "class": f"{kind.__module__}.{kind.__name__}",
        "code": str(Path(str(module.__file__)).parent),
        "weights": digest(drafter),
        "others": sorted(name for name in sys.modules if name.split(".")[0] == "modeling_dspark"),
    }
    answer.write_text(json.dumps(written), encoding="utf-8")


def digest(model: torch.nn.Module) -> str:
    """A hash of all tensors of a model, by name."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.float().cpu().numpy().tobytes())
    return found.hexdigest()


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
