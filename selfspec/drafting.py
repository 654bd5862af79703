"""Which drafter a call asks for: the exit, the form, and how far and how wide it drafts."""

from typing import TYPE_CHECKING

from selfspec.cascade import CascadeDrafter, CascadeHead
from selfspec.decode import RULES, exact_width
from selfspec.drafter import DRAFTERS, Drafter, NoDrafter
from selfspec.exit_module import FORMS
from selfspec.exits import ExitHead
from selfspec.lookup import MOST, LookupDrafter, PromptLookup
from selfspec.policy import Policy
from selfspec.settings import DecodeOptions

if TYPE_CHECKING:
    from selfspec.model import EarlyExitModel

DEFAULT_DRAFT_LEN = 2
MOST_DRAFTS = 63  # of a pass, beside the last token


def drafter_for(model: "EarlyExitModel", options: DecodeOptions, exact: bool) -> tuple[Drafter, int]:
    """The drafter, and how many tokens it drafts at most; switched off as many, for exact mode's sake."""
    head = _exit(model, options)
    draft_len, stop = _reach(model, options, head, exact)
    form = "off" if head is None else head.config.form
    kind = options.draft or form
    if kind not in DRAFTERS:
        raise ValueError(f"draft={kind!r}; choose one of {', '.join(DRAFTERS)}")
    if options.acceptance not in RULES:
        raise ValueError(f"acceptance={options.acceptance!r}; choose one of {', '.join(RULES)}")
    width = _draft_width(model, options, head, exact)
    if options.draft_width is None:  # not asked for: it gives way
        width = max(1, min(width, MOST_DRAFTS // max(draft_len, 1)))
    lookup = _lookup(model, options, kind, head, exact)
    num_drafts = max(draft_len * width, 0 if lookup is None else lookup.num_tokens)
    exact_width(num_drafts)  # also refuses more rows than a verify pass takes
    if kind == "lookup":
        return LookupDrafter(lookup), num_drafts
    if kind == "off" or draft_len == 0:
        return NoDrafter(), num_drafts
    if head is None:
        raise ValueError('no exits to draft from; pass exits=[layer, ...] at loading, or draft="off"')
    if kind in FORMS and kind != form:
        raise ValueError(f"draft={kind!r}: exit {head.name} was made for {form!r}")
    if not 0 <= stop <= 1:
        raise ValueError(f"min_confidence must be in [0, 1], got {stop}")
    if options.cascade is not None:
        both = CascadeHead(_named(model, options.cascade), head)
        return CascadeDrafter(model.target, both, draft_len, stop, lookup=lookup), num_drafts
    return DRAFTERS[kind](model.target, head, draft_len, stop, width, lookup), num_drafts


def _lookup(
    model: "EarlyExitModel", options: DecodeOptions, kind: str, head: ExitHead | None, exact: bool
) -> PromptLookup | None:
    """What looks drafts up in the text: as asked; else beside an exit where the CPU's kernels verify trees, exactly."""
    num_tokens, is_fused = options.prompt_lookup_num_tokens, model.target.fused.is_in_use and not options.is_float8
    is_alone = options.cascade is not None or (exact and not is_fused)  # where there are chains alone
    if num_tokens is None:
        is_wanted = kind == "lookup" or (is_fused and head is not None and not is_alone and not model.engine.is_on)
        num_tokens = MOST if is_wanted else 0
    if num_tokens < 0 or (kind == "lookup" and num_tokens == 0):
        least = 1 if kind == "lookup" else 0
        raise ValueError(f"prompt_lookup_num_tokens must be >= {least}, got {num_tokens}")
    return PromptLookup(num_tokens, joins=not is_alone) if num_tokens else None


def _draft_width(model: "EarlyExitModel", options: DecodeOptions, head: ExitHead | None, exact: bool) -> int:
    """Candidates a step: the exit's own number where rows are cheap, by the CPU's kernels or in the engine's cycles."""
    width, is_fused = options.draft_width, model.target.fused.is_in_use and not options.is_float8
    if width is None:
        has_siblings = is_fused or (model.engine.is_on and not exact)
        return 1 if head is None or not has_siblings or options.cascade else head.config.draft_width
    if width < 1:
        raise ValueError(f"draft_width must be >= 1, got {width}")
    if width > 1 and exact and not is_fused:
        raise ValueError(f"draft_width={width}: only chains are exact here; pass exact=False (--no-exact)")
    return width


def _reach(model: "EarlyExitModel", options: DecodeOptions, head: ExitHead | None, exact: bool) -> tuple[int, float]:
    """The largest number of drafts and the stop: those given, else what was timed here or what the exit has."""
    draft_len, stop = (DEFAULT_DRAFT_LEN, 0.0) if head is None else (head.config.draft_len, head.config.min_confidence)
    if options.draft_len == "auto" and head is not None:
        policy = _policy(model, head, exact)
        draft_len, stop = policy.draft_len, policy.min_confidence
    elif isinstance(options.draft_len, str) and options.draft_len != "auto":
        raise ValueError(f"draft_len={options.draft_len!r}; give a number or 'auto'")
    elif options.draft_len is not None and options.draft_len != "auto":
        draft_len = int(options.draft_len)
    if draft_len < 0:
        raise ValueError(f"draft_len must be >= 0, got {draft_len}")
    return draft_len, stop if options.min_confidence is None else options.min_confidence


def _policy(model: "EarlyExitModel", head: ExitHead, exact: bool) -> Policy:
    found = model.policies.known(head, exact)
    if found is None:
        with model.alone():
            found = model.policies.find(head, exact)
    return found


def _exit(model: "EarlyExitModel", options: DecodeOptions) -> ExitHead | None:
    if options.exit is not None:
        return _named(model, options.exit)
    if options.exit_layer is not None:
        fitting = [h for h in model.exits.values() if h.exit_layer == options.exit_layer]
        if not fitting:
            layers = sorted({h.exit_layer for h in model.exits.values()})
            raise ValueError(
                f"no exit at layer {options.exit_layer}; there are exits at {layers or 'no layer'} "
                f"of 1..{model.target.num_layers - 1}"
            )
        return fitting[0]
    return model.default_exit


def _named(model: "EarlyExitModel", name: str) -> ExitHead:
    if name not in model.exits:
        raise ValueError(f"no exit {name!r}; there are: {', '.join(model.exits) or 'none'}")
    return model.exits[name]
