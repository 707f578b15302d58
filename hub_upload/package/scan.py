"""Find what must not be published: secrets, pickles, and paths of somebody's machine.

A finding names file, line and kind, never the secret itself, since output ends up in logs.
"""

import base64
import io
import pickletools
import re
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open


_SECRETS = {
    "a Hugging Face token": rb"\bhf_[A-Za-z0-9]{20,}",
    "an AWS key": rb"\b(AKIA|ASIA)[A-Z0-9]{16}\b",
    "an API key (sk-...)": rb"\bsk-[A-Za-z0-9_-]{20,}",
    "a GitHub token": rb"\b(gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,})",
    "a Google API key": rb"\bAIza[\w-]{35}",
    "a Slack token": rb"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY( BLOCK)?-----",
    "a password in a URL": rb"://[^\s/:@'\"{}<>]+:[^\s/@'\"{}<>]+@[\w.-]+",
}
_LOCAL_PATH = re.compile(
    rb"(?<![\w.:/~\-])/(home|Users|root|mnt|media|scratch|tmp|workspace|work|data|private|var/folders)/[\w.-]+"
    rb"|\b[A-Za-z]:\\{1,2}(Users|Documents)\\"
)
_PICKLE_NAMES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".npy", ".npz")
_ZIP = b"PK\x03\x04"  # `torch.save` writes a zip with a pickle in it
_PNG = b"\x89PNG"
_BASE64 = re.compile(rb"[A-Za-z0-9+/]{24,}")


def scan(path: Path, name: str) -> list[str]:
    """The reasons why a file must not be published.

    Args:
        path (`Path`): The file.
        name (`str`): Its name in messages.

    Returns:
        `list[str]`: one line per finding; empty if the file may be published.
    """
    if path.suffix.lower() in _PICKLE_NAMES:
        return [f"{name}: a pickle by its name ({path.suffix}); weights are published as safetensors"]
    if path.suffix == ".safetensors":
        return _scan_weights(path, name)
    data = path.read_bytes()
    if is_pickle(data):
        return [f"{name}: a pickle by its content, which runs code when it is loaded"]
    if path.suffix == ".png":
        problems = [] if data.startswith(_PNG) else [f"{name}: not a picture"]
    else:
        problems = [] if _is_text(data) else [f"{name}: not a text in UTF-8"]
    return problems + _scan_content(data, name)


def _is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def is_pickle(data: bytes) -> bool:
    """Whether the data are a pickle of any protocol, or a zip as written by `torch.save`."""
    if data.startswith(_ZIP) or zipfile.is_zipfile(io.BytesIO(data)) or re.match(rb"\x80[\x02-\x05]", data):
        return True
    # Protocols 0 and 1 have no magic number, but every pickle ends with the opcode for "stop".
    if not data.endswith(b"."):
        return False
    try:
        return max(position for _, _, position in pickletools.genops(data) if position is not None) == len(data) - 1
    except (ValueError, IndexError):
        return False


def check_text(name: str, text: str) -> None:
    """Refuse a text with a secret or a path of this machine.

    Raises:
        ValueError: names the file, the line and the kind of the finding.
    """
    if found := _scan_content(text.encode(), name):
        raise ValueError(f"{'; '.join(found)}: this would be published; remove it.")


def _scan_weights(path: Path, name: str) -> list[str]:
    try:
        with safe_open(path, framework="np") as weights:
            metadata = (weights.metadata() or {}) | dict.fromkeys(weights.keys(), "a tensor")
    except (SafetensorError, OSError) as error:
        return [f"{name}: not a safetensors file ({error})"]
    return _scan_content("\n".join(f"{key}={value}" for key, value in metadata.items()).encode(), f"{name} (metadata)")


def _scan_content(data: bytes, name: str) -> list[str]:
    kinds = [(kind, re.compile(pattern)) for kind, pattern in _SECRETS.items()]
    if b"\0" not in data:
        kinds.append(("a path of this machine", _LOCAL_PATH))
    found = [(match.start(), kind) for kind, pattern in kinds for match in pattern.finditer(data)]
    for match in _BASE64.finditer(data):
        decoded = base64.b64decode(match[0][: len(match[0]) // 4 * 4])
        found += [
            (match.start(), f"{kind} in base64") for kind, pattern in _SECRETS.items() if re.search(pattern, decoded)
        ]
    lines = [(1 + data.count(b"\n", 0, position), kind) for position, kind in sorted(found)]
    return [f"{name}:{line}: {kind}" for line, kind in lines]


__all__ = ["check_text", "is_pickle", "scan"]
