"""Convert a drafter's checkpoint to another format: plan it in full, then stream it to a new folder."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hub_upload.convert.folders import check_output, write_folder
from hub_upload.convert.sources import CALIBRATION, Checkpoint, Target, check_copies, open_checkpoint, open_target
from hub_upload.convert.streaming import Piece, cast_piece, write_safetensors
from hub_upload.convert.writers import WRITERS
from modeling_dspark.formats.tensors import StoredTensor


CASTS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_WRITTEN = ("config.json", "model.safetensors", CALIBRATION)


@dataclass(frozen=True)
class Plan:
    """A conversion, ready to run.

    Attributes:
        source (`str`): The checkpoint to read.
        kind (`str`): Its format.
        to (`str`): The format to write.
        config (`dict`): `config.json` in that format.
        pieces (`list[Piece]`): The tensors.
        calibration (`bytes`, *optional*): `calibration.json`, in SGLang's form.
        notes (`list[str]`): Notes for the user.
        read (`list[Path]`): Local folders that are read.
    """

    source: str
    kind: str
    to: str
    config: Mapping[str, Any]
    pieces: list[Piece]
    calibration: bytes | None
    notes: list[str]
    read: list[Path]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


def plan_conversion(source: str, to: str, *, target: str | None = None, dtype: str | None = None) -> Plan:
    """Read the headers of a checkpoint, and decide what to write.

    Args:
        source (`str`): Folder or Hub id, in any known format.
        to (`str`): `dspark`, `deepspec` or `speculators`.
        target (`str`, *optional*): The target: copies of its matrices are compared with it, and read from it.
        dtype (`str`, *optional*): Write all weights as `bfloat16`, `float16` or `float32`; unchanged by default.

    Raises:
        ValueError: if the checkpoint or the target does not fit, or if the format cannot represent the drafter.
    """
    if to not in WRITERS:
        raise ValueError(f"`--to` must be one of {', '.join(WRITERS)}, got {to!r}.")
    if dtype is not None and dtype not in CASTS:
        raise ValueError(f"`--dtype` must be one of {', '.join(CASTS)}, got {dtype!r}.")
    checkpoint, notes = open_checkpoint(source), []
    opened = None if target is None else open_target(target, checkpoint.config)
    if opened is not None:
        check_copies(checkpoint, opened)
        notes += _fill_in(checkpoint, opened)
    elif checkpoint.copies:
        notes.append(
            "The copies of the target's embedding and LM head were not compared with it; give `--target` to compare them."
        )
    if dtype is not None:
        checkpoint.config.dtype = dtype
    draft = WRITERS[to](checkpoint, opened)
    pieces = draft.pieces if dtype is None else [cast_piece(piece, CASTS[dtype]) for piece in draft.pieces]
    calibration = _calibration(checkpoint, to)
    read = sorted({piece.path.parent for piece in (*checkpoint.tensors.values(), *_matrices(opened))})
    return Plan(source, checkpoint.kind, to, draft.config, pieces, calibration, notes + draft.notes, read)


def convert(
    plan: Plan, output: str | Path, *, overwrite: bool = False, advance: Callable[[int], object] = lambda _: None
) -> list[Path]:
    """Run a conversion.

    Args:
        plan ([`Plan`]): From `plan_conversion`.
        output (`str` or `Path`): Folder to make; written aside, then moved into place.
        overwrite (`bool`, *optional*, defaults to `False`): Replace `output`, if it is an earlier conversion.
        advance (callable, *optional*): Called with the number of bytes of each part written.

    Returns:
        `list[Path]`: the files, sorted.

    Raises:
        ValueError: if `output` exists and may not be replaced.
    """
    target = Path(output)
    check_before(plan, target, overwrite=overwrite)

    def fill(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(plan.config, indent=2, sort_keys=True) + "\n")
        if plan.calibration is not None:
            (folder / CALIBRATION).write_bytes(plan.calibration)
        write_safetensors(folder / "model.safetensors", plan.pieces, advance)

    return write_folder(target, fill)


def check_before(plan: Plan, target: Path, *, overwrite: bool) -> None:
    """Refuse an output folder that may not be written."""
    check_output(target, _WRITTEN.__contains__, overwrite=overwrite, inputs=plan.read)


def _matrices(target: Target | None) -> list[StoredTensor]:
    return [] if target is None else [target.embedding, target.head]


def _fill_in(checkpoint: Checkpoint, target: Target) -> list[str]:
    """Fill in fields that a checkpoint of another format lacks, from the target."""
    config, notes = checkpoint.config, []
    if config.num_target_layers is None:
        config.num_target_layers = target.num_layers
        notes.append(f"`num_target_layers` is {target.num_layers}, from the target.")
    if config.target_name_or_path is None:
        config.target_name_or_path = target.name
        notes.append(f"`target_name_or_path` is {target.name!r}, as given.")
    return notes


def _calibration(checkpoint: Checkpoint, to: str) -> bytes | None:
    """`calibration.json`: the source's, or the temperatures alone for readers that do not take them from the config."""
    temperatures = checkpoint.config.confidence_temperatures
    if checkpoint.calibration is not None or temperatures is None or to == "dspark":
        return checkpoint.calibration
    empty: dict[str, Any] = {"dataset": "", "num_samples": 0, "ece_before": [], "ece_after": []}
    return (json.dumps({"temperatures": temperatures} | empty, indent=2) + "\n").encode()


def plan_lines(plan: Plan) -> list[str]:
    """A plan in words: formats, fields, tensors."""
    lines = [f"from {plan.kind}: {plan.source}", f"to   {plan.to}", "", "config.json"]
    lines += [f"  {name}: {json.dumps(value)}" for name, value in sorted(plan.config.items())]
    lines += ["", f"model.safetensors ({plan.num_bytes:,} bytes)"]
    width = max(len(piece.name) for piece in plan.pieces)
    for piece in sorted(plan.pieces, key=lambda piece: piece.name):
        lines.append(f"  {piece.name:<{width}}  {piece.dtype:<4}  {list(piece.shape)}")
    if plan.calibration is not None:
        lines += ["", f"{CALIBRATION} ({len(plan.calibration):,} bytes)"]
    return lines


__all__ = ["Plan", "convert", "plan_conversion", "plan_lines"]
