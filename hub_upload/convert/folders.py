"""Make a folder as a whole: write it aside, move it into place, and replace nothing that others put there."""

import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from modeling_dspark.formats.load import read_config
from modeling_dspark.formats.table import detect


def check_output(
    target: Path, is_ours: Callable[[str], bool], *, overwrite: bool, inputs: Collection[Path] = ()
) -> None:
    """Refuse a folder that may not be written.

    Args:
        target (`Path`): Folder to make.
        is_ours (callable): Whether an earlier folder may hold a file of this name, relative to it and with `/`.
        overwrite (`bool`): Whether an earlier folder may be replaced.
        inputs (collection of `Path`): Folders that are read.

    Raises:
        ValueError: names the reason.
    """
    outside = target.resolve()
    for source in inputs:
        inside = source.resolve()
        if inside == outside or inside in outside.parents or outside in inside.parents:
            raise ValueError(
                f"`output` (`{target}`) is a folder that is read, contains it or is inside of it (`{source}`); choose another "
                "folder."
            )
    if target.is_symlink():
        raise ValueError(f"`{target}` is a symbolic link; give the folder itself.")
    if not target.exists():
        return
    if not overwrite:
        raise ValueError(
            f"`{target}` exists; pass `--overwrite` to replace the result of an earlier run, or give another folder."
        )
    if not target.is_dir() or not _is_drafter(target):
        raise ValueError(f"`{target}` exists and was not written by this command, so it is not replaced.")
    paths = [path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir()]
    foreign = sorted(path for path in paths if not is_ours(path))
    if foreign:
        raise ValueError(
            f"`{target}` holds files that this command does not write ({foreign[:5]}), so it is not replaced."
        )


def _is_drafter(folder: Path) -> bool:
    """Whether the config of a folder is a drafter's: other models have files of the same names."""
    try:
        detect(read_config(folder), {}, str(folder))
    except (OSError, ValueError):
        return False
    return True


def write_folder(target: Path, fill: Callable[[Path], None]) -> list[Path]:
    """Call `fill` with an empty folder beside `target`, then move it there; on any error `target` is as it was.

    Returns:
        `list[Path]`: the files, sorted.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    workspace = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    new, old = workspace / "new", workspace / "old"
    try:
        new.mkdir()
        fill(new)
        if target.exists():
            target.rename(old)
        new.rename(target)
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(workspace, ignore_errors=True)
    return sorted(path for path in target.rglob("*") if path.is_file())


__all__ = ["check_output", "write_folder"]
