"""Check a drafter: first its files, without running it, then its greedy text, in a process of its own.

Code that differs from the installed project's runs only if the user accepted it. Texts are compared token for token in
fp32, with whole blocks verified. The acceptance length is new tokens per forward of the target, counted outside of the
drafter's code, and is printed beside the card's: whether a difference matters depends on the prompts, so it is not judged.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import training
from hub_upload.card.header import greedy_lengths
from hub_upload.card.quotes import slug
from hub_upload.hub import verify_probe
from hub_upload.hub.checks import FAIL, OK, OPEN, Check, static_checks
from hub_upload.hub.subject import Subject, find_subject
from modeling_dspark import DSparkModel
from training.common.targets import load_tokenizer, resolve_target
from training.evaluation.runs import PromptSet, plan_sets, read_sets


PROMPTS = Path(training.__file__).parent / "evaluation" / "prompts_eval.jsonl"
_LONGEST_PROMPT = 512  # tokens


@dataclass(frozen=True)
class Settings:
    """What to decode.

    Attributes:
        target (`str`): The target, as `training.common.targets.load_target` takes it.
        prompts (`str`): JSONL file of prompts, with the names of their sets in `source` or `category`.
        limit (`int`): Prompts per set.
        max_new_tokens (`int`): Maximum length of an answer.
        device (`str`): Where both models run, in fp32.
    """

    target: str
    prompts: str = str(PROMPTS)
    limit: int = 2
    max_new_tokens: int = 64
    device: str = "cpu"


def verify(
    name: str,
    settings: Settings,
    *,
    revision: str | None = None,
    accepted_code: str | None = None,
    dry_run: bool = False,
) -> Iterator[Check]:
    """Check a drafter; yields each result as soon as it is known.

    Args:
        name (`str`): A folder, or a repository on the Hub.
        settings (`Settings`): What to decode.
        revision (`str`, *optional*): Branch, tag or commit of a repository.
        accepted_code (`str`, *optional*): Digest of code that differs from the installed project's and may run.
        dry_run (`bool`, *optional*, defaults to `False`): Only check what needs no run of the drafter.

    Raises:
        ValueError: if an argument does not fit; names it.
    """
    sets = _prompts(settings)
    subject = find_subject(name, revision)
    yield subject.check
    runs = subject.check.verdict == OK
    for check in static_checks(subject.folder, accepted_code):
        runs &= not (check.name in ("files", "code") and check.verdict == FAIL)
        yield check
    if dry_run:
        return
    if not runs:
        yield Check("decoding", FAIL, "not run, because of the failures above: it would run code that nobody has read")
        return
    yield from _decoding(subject, settings, sets)


def _decoding(subject: Subject, settings: Settings, sets: dict[str, PromptSet]) -> Iterator[Check]:
    prompts = [(name, list(prompt.input_ids)) for name, part in sets.items() for prompt in part.prompts]
    with tempfile.TemporaryDirectory(prefix="dspark-verify-") as folder:
        answer = _probe(Path(folder), subject, settings, [ids for _, ids in prompts])
        loading = _check_loading(answer, subject, Path(folder))
    yield loading
    if answers := answer.get("prompts"):
        yield _check_text(answers)
        yield _acceptance_length([name for name, _ in prompts], answers, subject.folder)


def _prompts(settings: Settings) -> dict[str, PromptSet]:
    if not Path(settings.prompts).is_file():
        raise ValueError(
            f'`--prompts`: there is no file `{settings.prompts}`; a line is `{{"turns": ["a question"]}}`.'
        )
    _, lines, records = read_sets(settings.prompts, group_by=None, limit=settings.limit)
    sets = plan_sets(lines, records, load_tokenizer(settings.target), max_length=_LONGEST_PROMPT)
    if not any(part.prompts for part in sets.values()):
        raise ValueError(f"`--prompts`: no prompt of `{settings.prompts}` has at most {_LONGEST_PROMPT} tokens.")
    return sets


def _probe(folder: Path, subject: Subject, settings: Settings, prompts: list[list[int]]) -> dict[str, Any]:
    """Run the probe by its file in an empty folder, from where neither this package nor a copy of it can be imported."""
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
    # Prints of the drafter's code go to stderr, where they cannot pass for a verdict.
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
    # The installed code reads the weights once more; the package's code is the same, or accepted.
    if answer["weights"] != verify_probe.digest(DSparkModel.from_pretrained(subject.folder, dtype="float32")):
        problems.append("the weights that were loaded are not those of model.safetensors")
    return Check.of("loading", problems, "by AutoModel, with the code that came with it, in a clean process")


def _check_text(answers: list[dict[str, Any]]) -> Check:
    problems = []
    for number, answer in enumerate(answers):
        plain, assisted = answer["plain"], answer["assisted"]
        if plain != assisted:
            equal = [a == b for a, b in zip(plain, assisted, strict=False)]
            problems.append(f"prompt {number} differs from token {[*equal, False].index(False)} on")
    tokens = sum(len(answer["assisted"]) for answer in answers)
    return Check.of(
        "greedy text", problems, f"{len(answers)} prompts, {tokens} tokens: each as without the drafter (fp32)"
    )


def _acceptance_length(names: list[str], answers: list[dict[str, Any]], folder: Path) -> Check:
    """New tokens per forward of the target after the prefill, by set, beside those of the card."""
    tokens: dict[str, int] = defaultdict(int)
    rounds: dict[str, int] = defaultdict(int)
    for name, answer in zip(names, answers, strict=True):
        tokens[name] += len(answer["assisted"]) - 1  # the prefill's token
        rounds[name] += answer["forwards"] - 1
    measured = {name: tokens[name] / rounds[name] for name in tokens if rounds[name]}
    if not measured:
        return Check("acceptance length", OPEN, "no answer had more than one token")
    try:
        stated = greedy_lengths(folder)
    except ValueError:  # `check_card` has reported it
        stated = {}
    phrases = []
    for name, length in measured.items():
        card = " or ".join(f"{value:.2f}" for value in stated.get(slug(name), ())) or "-"
        phrases.append(f"{name} {length:.2f} (card: {card})")
    verdict = OK if any(slug(name) in stated for name in measured) else OPEN
    return Check("acceptance length", verdict, f"{', '.join(phrases)}; {sum(rounds.values())} rounds")


__all__ = ["PROMPTS", "Settings", "verify"]
