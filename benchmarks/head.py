"""Time the sequential head of a block: the fused operation against PyTorch's, and against reading `W2` once a slot.

    python -m benchmarks.head --threads 1
    python -m benchmarks.head --vocabulary 49152 --rows 1 4 16 --dtype bfloat16

Weights are random; what is measured does not depend on them. All ways take turns, and the fastest turn of each counts.
The floor is the time in which PyTorch sums up a tensor of the size of `W2`, for every slot.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.environment import environment
from benchmarks.packed import code_of, exit_status
from benchmarks.pair import DEFAULT_DRAFTER, DTYPES, HelpFormatter, positive_int
from benchmarks.report import markdown_table, write_json


HERE = Path(__file__).parent
DEFINITIONS = {
    "torch_ms": "fastest block with the drafter's `head_step`, slot by slot",
    "fused_ms": "fastest block with `dspark::sequential_head`",
    "floor_ms": "slots times the fastest sum over a tensor of the size of W2",
    "ratio": "torch_ms / fused_ms",
    "of_floor": "floor_ms / fused_ms: the share of the streaming bandwidth that the fused head reaches",
}


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.head", description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--drafter", default=DEFAULT_DRAFTER, help="its code is run; a folder or a Hub id")
    parser.add_argument("--vocabulary", type=positive_int, nargs="+", default=[49152, 151936], metavar="V")
    parser.add_argument("--rows", type=positive_int, nargs="+", default=[1, 4], metavar="R")
    parser.add_argument("--rank", type=positive_int, default=256)
    parser.add_argument("--slots", type=positive_int, default=7, metavar="K")
    parser.add_argument("--kinds", nargs="+", default=["vanilla"], choices=("vanilla", "gated", "rnn"))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=DTYPES)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="0: the highest logit")
    parser.add_argument("--repeats", type=positive_int, default=15, help="turns of every way")
    parser.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--output", default=str(HERE / "results" / "head.json"), help="the JSON file")
    return parser.parse_args(argv)


def random_drafter(like: Any, *, vocabulary: int, rank: int, slots: int, kind: str, dtype: torch.dtype) -> Any:
    """A drafter of the class of `like` with one small layer and heads of the given sizes."""
    fields = like.config.to_dict() | {
        "vocab_size": vocabulary, "draft_vocab_size": None, "markov_rank": rank, "block_size": slots,
        "markov_head_type": kind, "num_hidden_layers": 1, "mask_token_id": 0, "confidence_temperatures": None,
        "default_num_assistant_tokens": None,
    }  # fmt: skip
    drafter = type(like)(type(like.config)(**fields)).to(dtype).eval()
    with torch.no_grad():
        drafter.markov_head.markov_w2.weight.normal_(0, 0.1)
    return drafter


def ways(drafter: Any, *, rows: int, slots: int, temperature: float) -> dict[str, Callable[[], Any]]:
    """What takes turns."""
    drafting, fused = code_of(drafter, "drafting_dspark"), code_of(drafter, "fused_head_dspark")
    weight = drafter.markov_head.markov_w2.weight
    base_logits = torch.randn(rows, slots, len(weight)).to(weight.dtype)
    hidden = torch.randn(rows, slots, drafter.config.hidden_size).to(weight.dtype)
    anchors = torch.randint(len(weight), (rows,))
    heads = fused.fusable_heads(drafter, base_logits)
    if heads is None:
        raise ValueError("The fused head is not available here; see the warning above.")

    def draw(logits: torch.Tensor, _: Any) -> torch.Tensor:
        return logits.float() / temperature

    def torch_way() -> Any:
        processor = draw if temperature else None
        return drafting._slot_by_slot(
            drafter, hidden, base_logits, anchors, processor, do_sample=bool(temperature), generator=None
        )

    def fused_way() -> Any:
        call = {"temperature": temperature, "seed": 1, "keep_logits": bool(temperature)}
        return fused.fused_block(heads, base_logits, hidden, anchors, **call)

    memory = weight.detach().view(torch.float32) if weight.shape[1] % 2 == 0 else weight.detach()
    return {"torch": torch_way, "fused": fused_way, "floor": lambda: [memory.sum() for _ in range(slots)]}


@torch.no_grad()
def fastest(candidates: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds of the fastest turn of each."""
    best = dict.fromkeys(candidates, float("inf"))
    for repeat in range(repeats + 1):  # the first one prepares kernels
        for name, way in candidates.items():
            begun = time.perf_counter()
            way()
            if repeat:
                best[name] = min(best[name], 1000 * (time.perf_counter() - begun))
    return best


def measure(like: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases, one after the other."""
    cases = list(
        itertools.product(options.vocabulary, options.dtype, options.kinds, options.rows, options.temperature)
    )
    results = []
    for vocabulary, dtype, kind, rows, temperature in tqdm(cases, desc="Cases"):
        torch.manual_seed(0)
        sizes = {"vocabulary": vocabulary, "rank": options.rank, "slots": options.slots, "kind": kind}
        drafter = random_drafter(like, **sizes, dtype=getattr(torch, dtype))
        best = fastest(
            ways(drafter, rows=rows, slots=options.slots, temperature=temperature), options.repeats
        )
        results.append(
            {
                **sizes,
                "dtype": dtype,
                "rows": rows,
                "temperature": temperature,
                **{f"{name}_ms": round(value, 3) for name, value in best.items()},
                "ratio": round(best["torch"] / best["fused"], 3),
                "of_floor": round(best["floor"] / best["fused"], 3),
            }
        )
    return results


def run(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    from transformers import AutoModel

    if options.threads:
        torch.set_num_threads(options.threads)
    like = AutoModel.from_pretrained(options.drafter, trust_remote_code=True)
    results = measure(like, options)
    names = ("vocabulary", "dtype", "kind", "rows", "temperature", "torch_ms", "fused_ms", "ratio", "of_floor")
    print(markdown_table(names, [[result[name] for name in names] for result in results]))
    facts = environment(", ".join(options.dtype))
    path = write_json(options.output, {"environment": facts, "definitions": DEFINITIONS, "results": results})
    print(f"written to {path}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status (2: cannot start, 130: interrupted)."""
    options = parse_options(argv)
    return exit_status(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
