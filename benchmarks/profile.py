"""Cost of a round of the packed loop on this machine, as a table, as JSON and as a diagram.

    python -m benchmarks.profile
    python -m benchmarks.profile --threads 2 --refresh --json costs.json --plot docs/images/costs.png
    python -m benchmarks.profile --sglang sglang_costs.json

The profile is the one that `generate` uses: it is read from the user's cache folder if it exists there, and otherwise, or
with `--refresh`, measured in some seconds and stored. A measurement needs a quiet machine, or `--allow-busy`.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib.machine import conditions
from benchmarks.lib.options import CommandParser, add_model_options, add_run_options, command, start
from benchmarks.lib.pair import load_pair
from benchmarks.lib.report import markdown_table, require_matplotlib, write_json


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser("profile", __doc__)
    add_model_options(parser)
    add_run_options(parser)
    parser.add_argument("--refresh", action="store_true", help="measure again, even if a profile is stored")
    parser.add_argument("--json", metavar="FILE", help="write the profile (`CostProfile.load` reads it)")
    parser.add_argument("--sglang", metavar="FILE", help="write the profile in SGLang's format")
    parser.add_argument("--plot", metavar="PNG", help="draw the profile")
    return parser.parse_args(argv)


def tables(profile: Any, block_size: int) -> str:
    """Costs by verified tokens and by drafting rows, greedy, with an empty context."""
    rounds = []
    for count in profile.verify.counts:
        rows = count // (block_size + 1)
        seconds = (profile.verify(count), profile.accept(count), profile.round_seconds(count, num_drafting=0))
        row = [count, *(f"{1000 * value:.2f}" for value in seconds), "-", "-"]
        if rows:
            drafting = profile.round_seconds(count, num_drafting=rows, num_draft_positions=block_size)
            row[-2:] = [f"{1000 * drafting:.2f}", f"{1 / drafting:.2f}"]
        rounds.append(row)
    header = ["verified tokens B", "forward ms", "rest ms", "plain step ms", "whole blocks ms", "rounds/s"]
    curves = (profile.draft, profile.position, profile.draft_sampled, profile.position_sampled)
    drafts = [[count, *(f"{1000 * curve(count):.2f}" for curve in curves)] for count in profile.draft.counts]
    context = f"Reading 1000 tokens of context adds {1e6 * profile.seconds_per_context:.3f} ms."
    drafts_header = ["drafting rows", "greedy ms", "+ each position", "sampled ms", "+ each position"]
    parts = [markdown_table(header, rounds), markdown_table(drafts_header, drafts)]
    return "\n\n".join([*parts, context])


def plot_profile(profile: Any, path: str | Path, *, block_size: int, title: str) -> None:
    """Draw the seconds of the parts of a round, and rounds per second, by verified tokens."""
    from matplotlib.figure import Figure  # `run` has checked that it is installed

    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    parts, rates = figure.subplots(1, 2)
    counts = profile.verify.counts
    plain = [profile.round_seconds(count, num_drafting=0) for count in counts]
    whole = [count for count in counts if count > block_size]  # a whole block needs more tokens
    drafting = [
        profile.round_seconds(count, num_drafting=count // (block_size + 1), num_draft_positions=block_size)
        for count in whole
    ]
    rows = profile.draft.counts
    blocks = [profile.draft(count) + block_size * profile.position(count) for count in rows]
    lines = (
        ("plain step, or verification, of B tokens", counts, plain, "black"),
        ("target forward of B tokens", counts, profile.verify.seconds, "tab:blue"),
        (f"drafting blocks of {block_size} for n rows", rows, blocks, "tab:orange"),
        ("rest of a round of B tokens", profile.accept.counts, profile.accept.seconds, "tab:green"),
    )
    for label, xs, seconds, colour in lines:
        parts.plot(xs, [1000 * value for value in seconds], marker="o", markersize=3, color=colour, label=label)
    parts.set(xlabel="tokens B, or rows n", ylabel="milliseconds", yscale="log")
    parts.yaxis.set_major_formatter("{x:g}")
    rates.plot(counts, [1 / value for value in plain], marker="o", markersize=3, color="black", label="no drafts")
    label = f"whole blocks of {block_size} drafted and verified"
    rates.plot(whole, [1 / value for value in drafting], marker="o", markersize=3, color="tab:orange", label=label)
    rates.set(xlabel="verified tokens B", ylabel="rounds per second, SPS(B)")
    rates.set_ylim(bottom=0)
    for axes in (parts, rates):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def run(options: argparse.Namespace) -> None:
    """Get the profile, print it, and write the files that the options name."""
    if options.plot:
        require_matplotlib("--plot")
    machine = start(options)
    pair = load_pair(options.target, options.drafter, options.dtype)
    drafter: Any = pair.drafter
    profile = drafter.profile(pair.target, refresh=options.refresh)
    block_size = drafter.config.block_size
    facts = machine.environment(options.dtype)
    title = f"{facts['cpu']}, {facts['threads']} of {facts['cores']} cores, {options.dtype}"
    report = {"environment": facts, "load": machine.load()}
    print(f"{tables(profile, block_size)}\n\n{conditions(report, batch='B tokens per forward', repeats='medians')}")
    written = []
    if options.json:
        profile.save(options.json)
        written.append(options.json)
    if options.sglang:
        written.append(write_json(options.sglang, profile.to_sglang(block_size)))
    if options.plot:
        plot_profile(profile, options.plot, block_size=block_size, title=title)
        written.append(options.plot)
    for path in written:
        print(f"written to {path}")


main = command(parse_options, run)


if __name__ == "__main__":
    sys.exit(main())
