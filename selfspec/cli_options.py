"""What the sub-commands share: options, reading a prompt, and one line for a user's mistake."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

MISTAKES = (ValueError, TypeError, OSError, NotImplementedError, FloatingPointError, MemoryError)


class Draft(StrEnum):
    """Forms of drafting."""

    chain = "chain"
    recursive = "recursive"
    parallel = "parallel"
    lookup = "lookup"
    off = "off"


class Acceptance(StrEnum):
    """Acceptance rules."""

    coupled = "coupled"
    rejection = "rejection"


def fail(message: object) -> NoReturn:
    """Say one line and leave with exit code 2."""
    text = " ".join(str(message).split()) or type(message).__name__
    typer.echo(f"selfspec: {text}", err=True)
    raise SystemExit(2)


@contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """Turn a user's mistake into one line and exit code 2, Ctrl-C into exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except MISTAKES as error:
        fail(error)


PromptArgument = Annotated[str | None, typer.Argument(help="The question; from --prompt-file or stdin if not given.")]
PromptFile = Annotated[Path | None, typer.Option(help="Read the prompt from a file.")]
Raw = Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without chat template.")]
Model = Annotated[str | None, typer.Option(help="Folder or hub id; SmolLM2-135M-Instruct if not given.")]
Revision = Annotated[str | None, typer.Option(help="Revision of a hub model.")]
Exits = Annotated[str | None, typer.Option(help="Folder or hub id of exits, or layers for untrained ones, as in 4,8.")]
ExitName = Annotated[str | None, typer.Option("--exit", help="Name of the exit to draft from.")]
Cascade = Annotated[str | None, typer.Option(help="Name of an earlier exit that guesses ahead for it.")]
AllowBaseMismatch = Annotated[
    bool, typer.Option("--allow-base-mismatch", help="Use exits trained for other weights; still lossless.")
]
MaxNewTokens = Annotated[int, typer.Option(help="Length limit of the answer, in tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")]
TopK = Annotated[int, typer.Option(help="Sample among the k likeliest tokens; 0 is off.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text, with and without drafting.")]
DraftLen = Annotated[
    str | None,
    typer.Option(metavar="INTEGER|auto", help="Largest number of drafted tokens a cycle; auto times cycles, once."),
]
MinConfidence = Annotated[
    float | None, typer.Option(help="Draft no further below this chance that all drafts stand; 0 is off.")
]
DraftWidth = Annotated[int | None, typer.Option(help="Candidates a draft step; 1 drafts a chain, more a tree.")]
PromptLookup = Annotated[
    int | None, typer.Option(help="Fill drafts up to so many tokens with what followed in the text before; 0 is off.")
]
AcceptanceRule = Annotated[Acceptance, typer.Option(help="Acceptance rule when sampling.")]
Exact = Annotated[
    bool | None, typer.Option("--exact/--no-exact", help="Bit-exact mode (L3); default: on in bf16 and fp16.")
]
KvCacheDtype = Annotated[
    str | None, typer.Option(help="float8: keys and values in eight bits; default: the model's dtype.")
]
Dtype = Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; default: what is fast here.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...")]
Config = Annotated[str, typer.Option(help="Name of a shipped config or path of a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value settings that override the config.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt: as given, from a file, or from stdin. Raises ValueError where there is none, or two."""
    if prompt is not None and prompt_file is not None:
        raise ValueError("give a prompt or --prompt-file, not both")
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{prompt_file}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    elif prompt is None:
        if sys.stdin.isatty():
            raise ValueError('no prompt: give one ("What is a KV cache?"), --prompt-file FILE, or pipe it in')
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    return prompt


def parse_draft_len(text: str | None) -> int | str | None:
    """A number where the text is one, else as it is, for the library to judge."""
    return int(text) if text is not None and text.removeprefix("-").isdecimal() else text


def parse_exits(text: str | None) -> str | list[int] | None:
    """Layers where the text lists some, else the folder or hub id that it is."""
    parts = [] if text is None else text.split(",")
    if parts and all(p.strip().lstrip("-").isdigit() for p in parts):
        return [int(p) for p in parts]
    return text
