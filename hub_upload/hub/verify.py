"""Whether a drafter does what its card says: checked without running it, then run in a process of its own.

Code that is not the installed project's is not run unless it was accepted. Losslessness is judged token for token in fp32
with whole blocks verified; accepted length and acceptance by position are compared with the claims as `hub_upload.hub.deviation`
says. The rounds are counted twice, as forwards of the target and by the drafter, and both counts have to agree.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hub_upload
from hub_upload.hub import verify_probe
from hub_upload.hub.checks import FAIL, OK, OPEN, Check, Report, static_checks
from hub_upload.hub.claims import Claims
from hub_upload.hub.deviation import FEWEST, FEWEST_TRIALS, LEVEL, compare
from hub_upload.hub.subject import Subject, find_subject
from modeling_dspark import DSparkModel
from training.common.targets import load_tokenizer, resolve_target
from training.confidence.rounds import without_tail as judged
from training.evaluation.runs import PromptSet, plan_sets, read_sets


PROMPTS = Path(hub_upload.__file__).parents[1] / "benchmarks" / "prompts_eval.jsonl"


@dataclass(frozen=True)
class Settings:
    """What to decode.

    Attributes:
        target (`str`): The target, as `training.common.targets.load_target` takes it.
        prompts (`str`): JSONL file of prompts, with the names of their sets in `source` or `category`.
        limit (`int`): Prompts of each set.
        max_new_tokens (`int`): Longest answer.
        device (`str`): Where both run, in fp32.
    """

    target: str
    prompts: str = str(PROMPTS)
    limit: int = 2
    max_new_tokens: int = 64
    device: str = "cpu"


@dataclass(frozen=True)
class Outcome:
    """What was seen of a prompt: its set, whether both texts are equal, and its rounds."""

    group: str
    difference: int | None
    forwards: int
    new_tokens: list[int]
    verified: list[int]
    accepted: list[int]

    def tried(self, position: int) -> int:
        """Rounds in which all positions before were kept and this one was verified."""
        return sum(v > position and a >= position for v, a in zip(self.verified, self.accepted, strict=True))

    def kept(self, position: int) -> int:
        return sum(v > position and a > position for v, a in zip(self.verified, self.accepted, strict=True))


def verify(
    name: str,
    settings: Settings,
    *,
    revision: str | None = None,
    report: str | None = None,
    accepted_code: str | None = None,
    dry_run: bool = False,
) -> Iterator[Check]:
    """Check a drafter; yields each row of the verdict as soon as it is known.

    Args:
        name (`str`): A folder, or a repository on the Hub.
        settings (`Settings`): What to decode.
        revision (`str`, *optional*): Branch, tag or commit of a repository.
        report (`str`, *optional*): A report of `training.evaluate`, whose claims then count, or of `benchmarks.latency`.
        accepted_code (`str`, *optional*): Digest of code that is not the installed project's and may run.
        dry_run (`bool`, *optional*, defaults to `False`): Check what can be checked without running the drafter.

    Raises:
        ValueError: if an argument does not fit; says which.
    """
    said = None if report is None else Report.read(report)
    sets = _prompts(settings)
    subject = find_subject(name, revision)
    yield subject.check
    claims, runs = None, subject.check.verdict == OK
    for check, found in static_checks(subject.folder, report=said, accepted_code=accepted_code):
        claims = claims or found
        runs &= not (check.name in ("files", "code") and check.verdict == FAIL)
        yield check
    if dry_run:
        return
    if not runs:
        yield Check("decoding", FAIL, "not run: what is wrong above would run code that nobody has looked at")
        return
    yield from _decoding(subject, settings, sets, claims)


def _decoding(
    subject: Subject, settings: Settings, sets: dict[str, PromptSet], claims: Claims | None
) -> Iterator[Check]:
    prompts = [(name, list(prompt.input_ids)) for name, part in sets.items() for prompt in part.prompts]
    with tempfile.TemporaryDirectory(prefix="dspark-verify-") as folder:
        answer = _probe(Path(folder), subject, settings, [ids for _, ids in prompts])
        loaded = _check_loading(answer, subject, Path(folder))
    yield loaded
    if not answer.get("prompts"):
        return
    outcomes = [_outcome(group, seen) for (group, _), seen in zip(prompts, answer["prompts"], strict=True)]
    yield _check_text(outcomes)
    yield from _check_figures(outcomes, claims)


def _prompts(settings: Settings) -> dict[str, PromptSet]:
    if not Path(settings.prompts).is_file():
        raise ValueError(
            f'`--prompts`: there is no file `{settings.prompts}`; a line is `{{"turns": ["a question"]}}`.'
        )
    _, lines, records = read_sets(settings.prompts, group_by=None, limit=settings.limit)
    sets = plan_sets(lines, records, load_tokenizer(settings.target), max_length=512)
    if (found := sum(len(part.prompts) for part in sets.values())) < FEWEST:
        raise ValueError(f"`--limit`: {found} prompts in all say too little; at least {FEWEST} are needed.")
    return sets


def _probe(folder: Path, subject: Subject, settings: Settings, prompts: list[list[int]]) -> dict[str, Any]:
    """Run the probe by its file in an empty folder: neither this package nor its copies can be found from there."""
    script = Path(shutil.copy(verify_probe.__file__, folder / "probe.py"))
    request = {
        "drafter": subject.name,
        "revision": subject.commit,
        "target": resolve_target(settings.target),
        "prompts": prompts,
        "max_new_tokens": settings.max_new_tokens,
        "device": settings.device,
    }
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules")}
    command = [sys.executable, "-E", str(script), "request.json", "answer.json"]
    # What the drafter's code prints does not go where the verdict does.
    done = subprocess.run(command, cwd=folder, env=environment, stdout=2, check=False)
    if done.returncode != 0 or not (folder / "answer.json").is_file():
        return {"error": f"the process ended with status {done.returncode}; its message is above"}
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    return answer


def _check_loading(answer: dict[str, Any], subject: Subject, folder: Path) -> Check:
    if "error" in answer:
        return Check("loading", FAIL, answer["error"])
    problems = []
    if not answer["class"].endswith("modeling_dspark.DSparkModel") or answer["others"]:
        problems.append(f"other code took part: {answer['class']} {answer['others']}")
    if not Path(answer["code"]).is_relative_to(folder.resolve() / "modules"):
        problems.append(f"the code came from {answer['code']}")
    if subject.commit is not None and Path(answer["code"]).name != subject.commit:
        problems.append(f"the code of {Path(answer['code']).name} was loaded")
    # By the installed code, which the package's was found equal to, or which the user accepted another for.
    if answer["weights"] != verify_probe.digest(DSparkModel.from_pretrained(subject.folder, dtype="float32")):
        problems.append("the weights that were loaded are not those of model.safetensors")
    return Check.of("loading", problems, "by AutoModel, with the code that came with it, in a clean process")


def _outcome(group: str, seen: dict[str, Any]) -> Outcome:
    plain, assisted, rounds = seen["plain"], seen["assisted"], seen["rounds"]
    shared = next((i for i, (a, b) in enumerate(zip(plain, assisted, strict=False)) if a != b), None)
    if shared is None and len(plain) != len(assisted):
        shared = min(len(plain), len(assisted))
    counts = zip(rounds["verified"], rounds["accepted"], rounds["new_tokens"], strict=True)
    pairs = [judged(verified=v, accepted=a, new_tokens=n) for v, a, n in counts]
    agree = 1 + sum(rounds["new_tokens"]) == len(assisted) and seen["forwards"] == 1 + len(pairs)
    return Outcome(
        group,
        shared,
        seen["forwards"] if agree else -1,
        rounds["new_tokens"],
        [verified for verified, _ in pairs],
        [accepted for _, accepted in pairs],
    )


def _check_text(outcomes: list[Outcome]) -> Check:
    different = [(number, each.difference) for number, each in enumerate(outcomes) if each.difference is not None]
    problems = [f"prompt {number} differs from token {position} on" for number, position in different]
    tokens = sum(1 + sum(each.new_tokens) for each in outcomes)
    return Check.of(
        "greedy text", problems, f"{len(outcomes)} prompts, {tokens} tokens: each as without the drafter (fp32)"
    )


def _check_figures(outcomes: list[Outcome], claims: Claims | None) -> Iterator[Check]:
    if any(each.forwards < 0 for each in outcomes):
        yield Check("accepted length", FAIL, "the drafter's counts are not those of the target's forwards")
        return
    useful = [each for each in outcomes if each.new_tokens]
    if len(useful) < FEWEST:
        yield Check("accepted length", OPEN, f"only {len(useful)} answers had more than one token; raise --limit")
        return
    # What is claimed for one kind of text says nothing about another.
    claimed = [] if claims is None else [each for each in useful if each.group in claims.sets]
    if claims is None or len(claimed) < FEWEST:
        rounds = [tokens for each in useful for tokens in each.new_tokens]
        said = "nothing is claimed"
        if claims is not None:
            said = f"claimed for {', '.join(claims.sets)} alone: give `--prompts`"
        measured = sum(rounds) / len(rounds)
        yield Check("accepted length", OPEN, f"{measured:.2f} measured in {len(rounds)} rounds, and {said}")
        return
    yield _check_length(claimed, claims)
    if set(claims.sets) == {each.group for each in useful}:  # else the pooled claim is of another mix of sets
        yield _check_positions(useful, claims)


def _check_length(outcomes: list[Outcome], claims: Claims) -> Check:
    """Compare rounds with those that the claims of the sets make of the tokens: then sets may differ as they like."""
    tokens, rounds = [sum(each.new_tokens) for each in outcomes], [len(each.new_tokens) for each in outcomes]
    groups = {each.group for each in outcomes}
    stated = claims.lengths(groups)
    expected = [n / stated[each.group] for each, n in zip(outcomes, tokens, strict=True)]
    claim = sum(tokens) / sum(expected)
    behind = claims.prompts(groups)
    found = compare(expected, rounds, 1.0, claim_prompts=behind, rounding=claims.rounding / claim)
    low, high = claim * found.low, claim * found.high
    said = f"claimed {claim:.2f}, measured {claim * found.measured:.2f} ({1 - LEVEL:.0%} interval {low:.2f} to {high:.2f})"
    verdict = FAIL if found.deviates else OK
    return Check("accepted length", verdict, f"{said}, {len(outcomes)} prompts, {sum(rounds)} rounds")


def _check_positions(outcomes: list[Outcome], claims: Claims) -> Check:
    """Each position at a level that all of them together keep to `LEVEL`."""
    problems, compared = [], []
    stated = [(position, share) for position, share in enumerate(claims.pooled.acceptance) if share is not None]
    for position, share in stated:
        tried, kept = [each.tried(position) for each in outcomes], [each.kept(position) for each in outcomes]
        if sum(tried) < FEWEST_TRIALS:
            continue
        level = LEVEL / len(stated)
        found = compare(kept, tried, share, claim_prompts=claims.pooled.prompts, rounding=claims.rounding, level=level)
        compared.append(f"{found.measured:.2f}")
        if found.deviates:
            problems.append(
                f"position {position}: claimed {share:.2f}, measured {found.measured:.2f} ({found.low:.2f} to {found.high:.2f})"
            )
    if not compared:
        return Check("acceptance", OPEN, f"no position was tried {FEWEST_TRIALS} times; raise --limit")
    return Check.of(
        "acceptance", problems, f"by position {' '.join(compared)}, as claimed ({len(compared)} positions compared)"
    )


__all__ = ["PROMPTS", "Settings", "verify"]
