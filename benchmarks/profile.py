"""What a round of the packed loop costs on this machine, as a table, as JSON and as a diagram.

    python -m benchmarks.profile
    python -m benchmarks.profile --threads 2 --refresh --json costs.json --plot docs/images/costs.png
    python -m benchmarks.profile --sglang sglang_costs.json

The profile is the one that `generate` uses: it is read from the user's cache folder if it is there, and measured (some
seconds) and stored if it is not, or with `--refresh`. Measure on a quiet machine.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.environment import environment
from benchmarks.lib.packed import add_packed_options, exit_status, require_matplotlib
from benchmarks.lib.pair import load_pair
from benchmarks.lib.report import markdown_table, write_json
from training.common.commands import HelpFormatter


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.profile", description=__doc__, formatter_class=HelpFormatter
    )
    add_packed_options(parser)
    parser.add_argument("--refresh", action="store_true", help="measure again")
    parser.add_argument("--json", metavar="FILE", help="write the profile (`CostProfile.load` reads it)")
    parser.add_argument("--sglang", metavar="FILE", help="write it in SGLang's format")
    parser.add_argument("--plot", metavar="PNG", help="draw it")
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
    context = f"Each 1000 tokens of context that are read add {1e6 * profile.seconds_per_context:.3f} ms."
    drafts_header = ["drafting rows", "greedy ms", "+ each position", "sampled ms", "+ each position"]
    parts = [markdown_table(header, rounds), markdown_table(drafts_header, drafts)]
    return "\n\n".join([*parts, context])


def plot_profile(profile: Any, path: str | Path, *, block_size: int, title: str) -> None:
    """Draw the seconds of the parts of a round, and rounds per second, by verified tokens."""
    from matplotlib.figure import Figure  # its absence is reported before anything is measured

    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    parts, rates = figure.subplots(1, 2)
    counts = profile.verify.counts
    plain = [profile.round_seconds(count, num_drafting=0) for count in counts]
    whole = [count for count in counts if count > block_size]  # with fewer tokens there is no whole block
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
    """Get the profile, print it, and write what is asked for."""
    if options.plot:
        require_matplotlib("--plot")
    if options.threads:
        torch.set_num_threads(options.threads)
    pair = load_pair(options.target, options.drafter, options.dtype)
    drafter: Any = pair.drafter
    profile = drafter.profile(pair.target, refresh=options.refresh)
    block_size = drafter.config.block_size
    facts = environment(options.dtype)
    title = f"{facts['cpu']}, {facts['threads']} of {facts['cores']} cores, {options.dtype}"
    print(f"{title}\n\n{tables(profile, block_size)}")
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


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status (2: cannot start, 130: interrupted)."""
    options = parse_options(argv)
    return exit_status(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
