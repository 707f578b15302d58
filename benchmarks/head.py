"""Time the sequential head of a block: the fused operation against PyTorch's, and against reading `W2` once per position.

    python -m benchmarks.head --threads 1
    python -m benchmarks.head --device cuda
    python -m benchmarks.head --vocabulary 49152 --rows 1 4 16 --dtype bfloat16 --kinds vanilla rnn

Weights are random, since times do not depend on them. All implementations take turns in changing order, and the fastest
turn of each counts; the ratio also comes with a 95 % bootstrap interval over turns. On a GPU a turn is ten blocks between
two events. The fused head and the floor are queued behind a pause, which excludes the time to queue them; PyTorch's
operations are timed as they are queued, as a drafter runs them.
"""

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.lib.intervals import drawn, edges
from benchmarks.lib.machine import conditions
from benchmarks.lib.options import (
    DEFAULT_DRAFTER,
    DTYPES,
    RESULTS,
    CommandParser,
    add_run_options,
    command,
    positive_int,
    start,
)
from benchmarks.lib.pair import check_drafter, code_of
from benchmarks.lib.report import markdown_table, write_json


CASES = {
    "cpu": {"vocabulary": [49152, 151936], "rows": [1, 4], "dtype": ["bfloat16", "float16", "float32"]},
    "cuda": {"vocabulary": [49152, 151936, 262144], "rows": [1, 4, 16, 64], "dtype": ["bfloat16"]},
}
DEFINITIONS = {
    "torch_ms": "fastest block with the drafter's `head_step`, position by position",
    "compiled_ms": "fastest block with the operation's PyTorch form under torch.compile",
    "fused_ms": "fastest block with `dspark::sequential_head`",
    "kernel_ms": "fastest call of its C++ alone, without the Python that packs arguments",
    "stepwise_ms": "fastest block with the same kernel in one launch per phase",
    "floor_ms": "positions times the fastest reading (a sum) of a tensor of the size of W2",
    "ratio": "torch_ms / fused_ms",
    "interval": "95 % bootstrap of the ratio of the fastest turns, over turns drawn in pairs",
    "of_floor": "floor_ms / kernel_ms (fused_ms on a GPU): the share of the streaming bandwidth",
    "of_floor_median": "the same for median turns",
}


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. Defaults of the cases depend on the device."""
    parser = CommandParser("head", __doc__)
    parser.add_argument("--drafter", default=DEFAULT_DRAFTER, help="a folder or a Hub id; its code is run")
    parser.add_argument("--device", default="cpu", choices=tuple(CASES), help="where the head runs")
    parser.add_argument(
        "--vocabulary", type=positive_int, nargs="+", metavar="V", help=f"columns of W2 {_usual('vocabulary')}"
    )
    parser.add_argument("--rows", type=positive_int, nargs="+", metavar="R", help=f"rows per block {_usual('rows')}")
    parser.add_argument("--rank", type=positive_int, default=256, metavar="N", help="rank of the sequential head")
    parser.add_argument(
        "--positions", "--slots", type=positive_int, default=7, metavar="K", help="draft tokens per block"
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=["vanilla"],
        choices=("vanilla", "gated", "rnn"),
        help="kinds of sequential heads",
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help=f"dtype of weights and logits {_usual('dtype')}")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="0: the highest logit")
    parser.add_argument(
        "--compiled", action="store_true", help="also time PyTorch under torch.compile; always on a GPU"
    )
    parser.add_argument("--repeats", type=positive_int, default=15, help="turns of each implementation")
    add_run_options(parser)
    parser.add_argument("--output", help="the JSON file (default: results/head.json, or head_cuda.json)")
    options = parser.parse_args(argv)
    for name, value in CASES[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    on_gpu = options.device == "cuda"
    options.compiled = options.compiled or on_gpu
    options.output = options.output or str(RESULTS / ("head_cuda.json" if on_gpu else "head.json"))
    return options


def _usual(name: str) -> str:
    """The default of an option, for its help."""
    cases = (f"{' '.join(map(str, values[name]))} ({device})" for device, values in CASES.items())
    return f"(default: {', '.join(cases)})"


def random_drafter(like: Any, *, vocabulary: int, rank: int, positions: int, kind: str, dtype: torch.dtype) -> Any:
    """A drafter of the class of `like` with one small layer and heads of the given sizes."""
    fields = like.config.to_dict() | {
        "vocab_size": vocabulary, "draft_vocab_size": None, "markov_rank": rank, "block_size": positions,
        "markov_head_type": kind, "num_hidden_layers": 1, "mask_token_id": 0, "confidence_temperatures": None,
        "default_num_assistant_tokens": None,
    }  # fmt: skip
    drafter = type(like)(type(like.config)(**fields)).to(dtype).eval()
    with torch.no_grad():
        drafter.markov_head.markov_w2.weight.normal_(0, 0.1)
    return drafter


Way = Callable[[], Any]


def ways(drafter: Any, *, rows: int, positions: int, temperature: float, compiled: bool) -> dict[str, Way]:
    """The implementations that take turns."""
    names = ("draft_binding", "draft_tokens", "fused_head", "fused_torch")
    bindings, drafting, fused, reference = (code_of(drafter, name) for name in names)
    weight = drafter.markov_head.markov_w2.weight
    place = {"dtype": weight.dtype, "device": weight.device}
    base_logits = torch.randn(rows, positions, len(weight), **place)
    hidden = torch.randn(rows, positions, drafter.config.hidden_size, **place)
    anchors = torch.randint(len(weight), (rows,), device=weight.device)
    choice = bindings.head_choice(None)
    if reason := fused.why_not_fused(drafter, weight.dtype, choice=choice):
        raise ValueError(f"The head cannot be fused for {weight.dtype} on {weight.device}: {reason}.")
    heads = fused.head_weights(drafter)
    call = {"temperature": temperature, "seed": 1, "keep_logits": bool(temperature)}
    inputs = reference.HeadInputs(base_logits, hidden, anchors, **heads, **call)

    block = drafting.DraftBlock(anchors, hidden, base_logits, None)
    unfused = SimpleNamespace(drafter=drafter, heads=None)  # a binding without a target, which the heads do not need
    sampling = drafting.DraftSampling(
        do_sample=bool(temperature),
        processor=(lambda _, logits: logits / temperature) if temperature else None,
        is_vocabulary_invariant=True,
    )

    def torch_way() -> Any:
        return drafting.choose_tokens(unfused, block, sampling)

    def fused_way() -> Any:
        return fused.fused_block(heads, base_logits, hidden, anchors, **call, backend=choice)

    memory = weight.detach().view(torch.float32) if weight.shape[1] % 2 == 0 else weight.detach()
    candidates: dict[str, Way] = {
        "torch": torch_way,
        "fused": fused_way,
        "floor": lambda: [memory.sum() for _ in range(positions)],
    }
    if compiled:
        head = torch.compile(reference.head_in_torch, dynamic=False)
        candidates["compiled"] = lambda: head(inputs)
    if weight.device.type == "cuda":
        candidates["stepwise"] = _captured(fused_way)
    else:
        candidates["kernel"] = _kernel(drafter, inputs, choice)
    return candidates


def _kernel(drafter: Any, inputs: Any, choice: str) -> Way:
    """The C++ call alone."""
    backends = code_of(drafter, "fused_backends")
    packed, outputs, alive = backends.pack(inputs, with_logits=inputs.keep_logits)
    backend = backends.backend_for(inputs.hidden.device, choice=choice)
    return lambda: (backend.launch(packed), outputs, alive)  # the tensors live as long as their addresses are used


def _captured(way: Way) -> Way:
    """A CUDA graph of an implementation; a block is then one launch per phase."""
    way()  # builds and allocates on first use
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way()
    return graph.replay


@torch.no_grad()
def turns(candidates: dict[str, Way], repeats: int, *, on_gpu: bool) -> dict[str, list[float]]:
    """Milliseconds of the turns of each implementation."""
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for repeat in range(repeats + 2):  # the first two prepare kernels
        # The order changes, since a turn finds in the caches what the turn before it read.
        for name in random.Random(repeat).sample(names, len(names)):
            way = candidates[name]
            passed = _gpu_milliseconds(way, pause=name not in ("torch", "compiled")) if on_gpu else _milliseconds(way)
            if repeat > 1:
                taken[name].append(passed)
    return taken


def _milliseconds(way: Way) -> float:
    begun = time.perf_counter()
    way()
    return 1000 * (time.perf_counter() - begun)


def _gpu_milliseconds(way: Way, *, pause: bool, blocks: int = 10) -> float:
    """Milliseconds per block, of several in a row."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if pause:
        torch.cuda._sleep(20_000_000)  # cycles, some 10 ms
    start.record()
    for _ in range(blocks):
        way()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / blocks


def measure(like: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases, one after the other."""
    results = []
    models = list(itertools.product(options.vocabulary, options.dtype, options.kinds))
    cases = list(itertools.product(options.rows, options.temperature))
    with tqdm(total=len(models) * len(cases), desc="Cases") as bar:
        for vocabulary, dtype, kind in models:
            torch.manual_seed(0)
            sizes = {"vocabulary": vocabulary, "rank": options.rank, "positions": options.positions, "kind": kind}
            drafter = random_drafter(like, **sizes, dtype=getattr(torch, dtype)).to(options.device)
            for rows, temperature in cases:
                case = {"rows": rows, "temperature": temperature}
                results.append({**sizes, "dtype": dtype, **case, **measure_case(drafter, case, options)})
                bar.update()
    return results


def measure_case(drafter: Any, case: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Fastest turns and their ratios."""
    compiled = options.compiled and not case["temperature"]  # the compiled head is greedy
    candidates = ways(drafter, **case, positions=options.positions, compiled=compiled)
    taken = turns(candidates, options.repeats, on_gpu=options.device == "cuda")
    best = {name: min(values) for name, values in taken.items()}
    median = {name: statistics.median(values) for name, values in taken.items()}
    chosen = drawn(options.repeats, (options.repeats,))
    fastest = {name: torch.tensor(taken[name])[chosen].amin(dim=1) for name in ("torch", "fused")}
    return {
        **{f"{name}_ms": round(value, 4) for name, value in best.items()},
        "ratio": round(best["torch"] / best["fused"], 3),
        "interval": list(edges(fastest["torch"] / fastest["fused"], digits=3)),
        "of_floor": round(best["floor"] / best.get("kernel", best["fused"]), 3),
        "of_floor_median": round(median["floor"] / median.get("kernel", median["fused"]), 3),
    }


def head_table(results: list[dict[str, Any]]) -> str:
    """The cases as Markdown, as the documentation quotes them."""
    sizes = ["vocabulary", "dtype", "kind", "rows", "temperature"]
    names = sizes + [name for name in DEFINITIONS if any(name in result for result in results)]
    names = [name for name in names if name != "interval"]
    return markdown_table(names, [[result.get(name, "") for name in names] for result in results])


def run(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    from transformers import AutoModel

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA device, and PyTorch sees none.")
    machine = start(options)
    check_drafter(options.drafter)
    like = AutoModel.from_pretrained(options.drafter, trust_remote_code=True)
    facts = machine.environment(", ".join(options.dtype), options.device)
    if options.device == "cuda":
        facts |= {"gpu": facts["device"], "cuda": torch.version.cuda}
    results = measure(like, options)
    print(head_table(results))
    definitions = {name: text for name, text in DEFINITIONS.items() if any(name in result for result in results)}
    report = {"environment": facts, "load": machine.load(), "definitions": definitions, "results": results}
    print(f"\n{conditions(report, batch='rows as listed', repeats=f'{options.repeats} turns')}")
    print(f"written to {write_json(options.output, report)}")


main = command(parse_options, run)


if __name__ == "__main__":
    sys.exit(main())
