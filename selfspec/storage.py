"""Exits on disk: one folder per exit, a PEFT adapter with a sidecar.

NAME/adapter_config.json, adapter_model.safetensors     what any PEFT user recognises
NAME/selfspec_config.json                               settings, fingerprint of the base, sha256, training, metrics
NAME/README.md                                          model card
"""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from selfspec.clones import present
from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.exits import ExitHead
from selfspec.files import first_line
from selfspec.model_card import model_card
from selfspec.pretrained import DEFAULT_HUB_ID
from selfspec.target import Target

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
SIDECAR, WEIGHTS = "selfspec_config.json", "adapter_model.safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SAMPLES = 64  # values of each tensor that enter the fingerprint


class ExitMismatchError(ValueError):
    """An exit does not belong to this target, or its files are not what they were."""


class _Base(BaseModel):
    id: str
    revision: str | None = None
    num_layers: int
    hidden_size: int
    fingerprints: list[str] = Field(min_length=1)


class _Sidecar(BaseModel):
    """What selfspec_config.json holds."""

    format_version: int
    head: ExitConfig
    base: _Base
    tokenizer_sha256: str | None = None
    training: dict[str, Any] = {}
    metrics: dict[str, float | None] = {}
    weights_sha256: str


def fingerprint(base: nn.Module) -> str:
    """Hash of names, shapes and sampled values of the base's tensors, the same in whatever dtype they were loaded."""
    digest = hashlib.sha256()
    for name, tensor in sorted(base.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        if tensor.is_meta or isinstance(tensor, DTensor):  # offloaded, or shared by several processes
            owner, _, leaf = name.rpartition(".")
            tensor = present(base.get_submodule(owner), leaf)
        if type(tensor) not in (torch.Tensor, nn.Parameter):  # quantised, as a kind of tensor
            tensor = tensor.dequantize()
        if tensor.is_floating_point() and tensor.numel():
            flat = tensor.detach().reshape(-1)
            places = torch.linspace(0, flat.numel() - 1, min(SAMPLES, flat.numel()), dtype=torch.float64).long()
            digest.update(flat[places.to(flat.device)].bfloat16().view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the vocabulary: every token with its id."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def save_exit(
    exit_head: ExitHead,
    target: Target,
    folder: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    training: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
) -> Path:
    """Write a trained exit to ``folder`` in bfloat16; the folder appears whole or not at all.

    ``training`` and ``metrics`` go into the sidecar and default to those the exit was loaded with. Raises ValueError
    for an untrained exit (nothing to save) and FileExistsError where ``folder`` already is something else.
    """
    if exit_head.adapter is None:
        raise ValueError(f"exit {exit_head.name!r} is untrained: there is nothing to save")
    folder = Path(folder)
    check_name(folder.name)
    if folder.exists() and any(folder.iterdir()) and not (folder / SIDECAR).is_file():
        raise FileExistsError(f"{folder} is not empty and holds no exit")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder.parent))
    try:
        exit_head.adapter.save_pretrained(temporary, save_embedding_layers=False)
        state = {k: v.detach().bfloat16().contiguous().cpu() for k, v in load_file(temporary / WEIGHTS).items()}
        save_file(state, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / WEIGHTS).chmod(0o644)
        sidecar = _sidecar(exit_head, target, tokenizer, training, metrics)
        sidecar["weights_sha256"] = _sha256(temporary / WEIGHTS)
        (temporary / SIDECAR).write_text(json.dumps(sidecar, indent=1) + "\n", encoding="utf-8")
        (temporary / "README.md").write_text(model_card(exit_head.name, sidecar), encoding="utf-8")
        temporary.chmod(0o755)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=".replaced-", dir=folder.parent))
            os.rename(folder, old / "exit")
            os.rename(temporary, folder)
            shutil.rmtree(old)
        else:
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _sidecar(
    exit_head: ExitHead,
    target: Target,
    tokenizer: PreTrainedTokenizerBase | None,
    training: dict[str, Any] | None,
    metrics: dict[str, Any] | None,
) -> dict[str, Any]:
    held = exit_head.metadata
    return {
        "format_version": FORMAT_VERSION,
        "head": exit_head.config.model_dump(mode="json"),
        "base": {
            "id": held.get("base", {}).get("id") or target.name,
            "revision": getattr(target.base.config, "_commit_hash", None),
            "num_layers": target.num_layers,
            "hidden_size": target.hidden_size,
            "fingerprints": held.get("base", {}).get("fingerprints") or [fingerprint(target.base)],
        },
        "tokenizer_sha256": tokenizer_hash(tokenizer) if tokenizer else held.get("tokenizer_sha256"),
        "training": training if training is not None else held.get("training", {}),
        "metrics": metrics if metrics is not None else held.get("metrics", {}),
    }


def load_exits(
    target: Target,
    source: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    allow_base_mismatch: bool = False,
    revision: str | None = None,
) -> dict[str, ExitHead]:
    """All exits in ``source``, a folder (of one exit, or of one folder per exit) or a hub id, by name.

    Raises ExitMismatchError where an exit was trained for another base, unless ``allow_base_mismatch`` (the text stays
    lossless, drafts get worse), or where its files are damaged; FileNotFoundError where there is no exit.
    """
    folder = _local(source, revision)
    folders = [folder] if (folder / SIDECAR).is_file() else sorted(p.parent for p in folder.glob(f"*/{SIDECAR}"))
    if not folders:
        raise FileNotFoundError(f"{source}: no exit found (a folder with {SIDECAR}, or a folder of such folders)")
    folders = [f.resolve() for f in folders]
    return {f.name: load_exit(target, f, tokenizer, allow_base_mismatch) for f in folders}


def check_name(name: str) -> str:
    """Return ``name`` if it may name an exit; raises ValueError otherwise."""
    if not NAME.fullmatch(name):
        raise ValueError(f"exit name {name!r}: only letters, digits, '.', '_' and '-'")
    return name


def fits(target: Target, folder: Path) -> bool:
    """Whether the exits in ``folder`` were made for the weights of ``target``, or for the default model if it is it."""
    bases = [_read_sidecar(path.parent)["base"] for path in sorted(folder.glob(f"*/{SIDECAR}"))]
    return any(_is_same_base(target, base) for base in bases)


def _is_same_base(target: Target, base: dict[str, Any]) -> bool:
    size = (base["num_layers"], base["hidden_size"])
    if size != (target.num_layers, target.hidden_size):
        return False
    return base["id"] == target.name == DEFAULT_HUB_ID or fingerprint(target.base) in base["fingerprints"]


def check_hub_id(text: str) -> str:
    """Return ``text`` if it is owner/name; raises ValueError otherwise."""
    if not re.fullmatch(rf"{NAME.pattern}/{NAME.pattern}", text) or ".." in text:
        raise ValueError(f"{text!r} is not a hub id (owner/name)")
    return text


def upload(
    folder: str | os.PathLike[str], repo_id: str, private: bool | None = None, revision: str | None = None
) -> None:
    """Put the exits in ``folder``, of one exit or of several, on the hub; whatever else lies there stays.

    Raises OSError, in one line, where the hub does not take it.
    """
    folder, api = Path(folder), HfApi()
    names = ["."] if (folder / SIDECAR).is_file() else [path.parent.name for path in folder.glob(f"*/{SIDECAR}")]
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        for name in sorted(names):
            place = None if name == "." else name
            api.upload_folder(repo_id=repo_id, folder_path=folder / name, path_in_repo=place, revision=revision)
    except Exception as error:  # the hub client raises many kinds; all mean that the exits are not there
        raise OSError(f"cannot upload {folder} to {repo_id}: {first_line(error)}; the exit itself is saved") from error


def _local(source: str | os.PathLike[str], revision: str | None) -> Path:
    folder = Path(source)
    if folder.is_dir():
        return folder
    text = str(source)
    try:
        check_hub_id(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a folder nor a hub id (owner/name)") from None
    try:
        return Path(snapshot_download(text, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.md"]))
    except Exception as error:  # the hub client raises many kinds; all mean that the exits are not to be had
        reason = first_line(error)
        raise OSError(f"cannot fetch exits {text!r}: {reason}; check name and network, or pass a folder") from error


def load_exit(
    target: Target,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    allow_base_mismatch: bool = False,
) -> ExitHead:
    """One exit from its folder; see `load_exits`."""
    check_name(folder.name)
    sidecar = _read_sidecar(folder)
    config = ExitConfig(**sidecar["head"])
    base = sidecar["base"]
    if (base["num_layers"], base["hidden_size"]) != (target.num_layers, target.hidden_size):
        raise ExitMismatchError(
            f"{folder}: made for {base['id']} ({base['num_layers']} layers, hidden {base['hidden_size']}), "
            f"not for {target.name} "
            f"({target.num_layers} layers, hidden {target.hidden_size})"
        )
    try:
        config.check(target.num_layers, target.vocab_size)
    except ValueError as error:
        raise ExitMismatchError(f"{folder / SIDECAR}: {error}") from error
    if not allow_base_mismatch:
        _check_base(target, folder, sidecar, tokenizer)
    state = _read_weights(folder, sidecar)
    adapter = build_adapter(target, config)
    expected = {k: v.shape for k, v in get_peft_model_state_dict(adapter, save_embedding_layers=False).items()}
    wrong = sorted(
        {k for k in {*expected, *state} if k not in state or k not in expected or state[k].shape != expected[k]}
    )
    if wrong:
        raise ExitMismatchError(f"{folder / WEIGHTS}: {len(wrong)} tensors missing or misshapen, e.g. {wrong[0]}")
    set_peft_model_state_dict(adapter, {k: v.to(target.dtype) for k, v in state.items()})
    return ExitHead(target, folder.name, config, adapter.eval().requires_grad_(False), sidecar)


def _read_sidecar(folder: Path) -> dict[str, Any]:
    path = folder / SIDECAR
    try:
        sidecar = json.loads(path.read_text(encoding="utf-8"))
        if sidecar["format_version"] != FORMAT_VERSION:
            raise ExitMismatchError(f"{path}: format {sidecar['format_version']}, this version reads {FORMAT_VERSION}")
        sidecar = _Sidecar(**sidecar).model_dump(mode="json")
        adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ExitMismatchError(f"{path}: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from error
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ExitMismatchError(
            f"{path}: not a valid exit ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error
    for key, name in (("r", "lora_rank"), ("lora_alpha", "lora_alpha")):
        if adapter.get(key) != (sidecar["head"][name] or 1):  # PEFT knows no rank 0
            raise ExitMismatchError(
                f"{folder}: adapter_config.json has {key} {adapter.get(key)}, the sidecar {sidecar['head'][name]}"
            )
    return dict(sidecar)


def _read_weights(folder: Path, sidecar: dict[str, Any]) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS
    try:
        state = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ExitMismatchError(f"{path}: missing, truncated or damaged ({error})") from error
    if _sha256(path) != sidecar["weights_sha256"]:
        raise ExitMismatchError(f"{path}: sha256 differs from the one recorded in {SIDECAR}; fetch the exit again")
    return state


def _check_base(
    target: Target, folder: Path, sidecar: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    remedy = "pass allow_base_mismatch=True (--allow-base-mismatch) to use it all the same"
    found = fingerprint(target.base)
    if found not in sidecar["base"]["fingerprints"] and sidecar["base"]["id"] == target.name == DEFAULT_HUB_ID:
        logger.warning("%s was trained on another copy of %s; the text stays lossless", folder.name, target.name)
    elif found not in sidecar["base"]["fingerprints"]:
        raise ExitMismatchError(
            f"{folder}: trained for other weights than these (base {sidecar['base']['id']}, fingerprint "
            f"{sidecar['base']['fingerprints'][0][:12]}, found {found[:12]}); {remedy}"
        )
    recorded = sidecar.get("tokenizer_sha256")
    if recorded and tokenizer is not None and tokenizer_hash(tokenizer) != recorded:
        raise ExitMismatchError(f"{folder}: trained with another tokenizer; {remedy}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
