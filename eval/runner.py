"""Asks a question of all methods in turn, and judges every text."""

import logging
from typing import Any

from torch import Tensor

from selfspec.compare import first_divergence
from selfspec.eval.config import EvalConfig
from selfspec.eval.engine import AR
from selfspec.eval.measure import Clock, Measured, Meter, Method, Phases, Request
from selfspec.eval.tasks import Question
from selfspec.model import EarlyExitModel

logger = logging.getLogger(__name__)
Row = dict[str, Any]


class Runner:
    """Asks questions of all methods in turn."""

    def __init__(self, model: EarlyExitModel, methods: dict[str, Method], config: EvalConfig, clock: Clock) -> None:
        self.model, self.methods, self.config, self.clock = model, methods, config, clock
        self.num_asked = 0  # prompts so far: turns the order of the methods

    def warm_up(self, question: Question) -> None:
        """Run every method once, untimed; what fails here fails again where it is counted."""
        ids = self._encode([{"role": "user", "content": question.turns[0]}])
        request = Request(min(16, self.config.max_new_tokens))
        for name, method in self.methods.items():
            try:
                method.prepare(ids, request)
                method.run(ids, request, Meter(ids.device, self.clock), Phases())
            except Exception as error:
                logger.warning("%s failed in the warm-up: %s", name, _line(error))

    def ask(self, question: Question) -> list[Row]:
        """Rows of all turns, temperatures and methods; later turns follow the answer of plain decoding."""
        rows: list[Row] = []
        for temperature in self.config.temperatures:
            chat: list[dict[str, str]] = []
            for turn, text in enumerate(question.turns):
                chat.append({"role": "user", "content": text})
                ids = self._encode(chat)
                request = Request(self.config.max_new_tokens, temperature, self.config.seed + turn)
                runs, made = self._run_all(ids, request), {}
                for name, run in runs.items():
                    made[name] = {
                        "task": question.task, "question": question.id, "category": question.category, "turn": turn,
                        "temperature": temperature, "method": name, "prompt_tokens": ids.shape[1],
                        **(describe(run) if isinstance(run, Measured) else {"error": _line(run)}),
                    }  # fmt: skip
                self._judge(ids, request, runs, made)
                rows += made.values()
                answer = runs[AR]
                if not isinstance(answer, Measured):
                    break  # nothing to go on from: the failure is on record
                assert self.model.tokenizer is not None
                content = self.model.tokenizer.decode(answer.tokens, skip_special_tokens=True)
                chat.append({"role": "assistant", "content": content})
        return rows

    def _encode(self, chat: list[dict[str, str]]) -> Tensor:
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        if self.config.template == "plain":
            ids = tokenizer("\n\n".join(m["content"] for m in chat), return_tensors="pt")["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        return ids.to(self.model.target.device)

    def _run_all(self, ids: Tensor, request: Request) -> dict[str, Measured | Exception]:
        names = list(self.methods)
        start = self.num_asked % len(names)
        self.num_asked += 1
        runs: dict[str, Measured | Exception] = {}
        for name in names[start:] + names[:start]:
            method, phases = self.methods[name], Phases()
            try:
                method.prepare(ids, request)
                meter = Meter(ids.device, self.clock)
                runs[name] = meter.measure(lambda m, f=method, p=phases: f.run(ids, request, m, p), phases)  # type: ignore[misc]
            except Exception as error:
                logger.warning("%s failed: %s", name, _line(error))
                runs[name] = error
        return {name: runs[name] for name in names}

    def _judge(
        self, ids: Tensor, request: Request, runs: dict[str, Measured | Exception], rows: dict[str, Row]
    ) -> None:
        """Hold every text against its reference's, where the same text is promised or can be explained."""
        prompt = ids[0].tolist()
        for name, run in runs.items():
            method = self.methods[name]
            expected = runs.get(method.reference, runs[AR])  # its own engine's may not have been asked for
            is_comparable = request.temperature == 0 or method.is_promised
            if not isinstance(run, Measured) or not isinstance(expected, Measured) or not is_comparable:
                continue
            gap = first_divergence(self.model.target, prompt, expected.tokens, run.tokens)
            rows[name] |= {
                "identical": gap is None,
                "num_compared": len(expected.tokens) if gap is None else gap.position + 1,
                "diverges_at": None if gap is None else gap.position,
                "gap_ulp": None if gap is None else gap.gap_ulp,
                "is_near_tie": gap is not None and gap.is_near_tie and not method.is_promised,
            }


def describe(run: Measured) -> Row:
    """What a row keeps of a run."""
    row: Row = {
        "num_tokens": len(run.tokens), "num_decoded": run.num_decoded, "num_cycles": run.num_cycles,
        "prefill_seconds": run.prefill_seconds, "decode_seconds": run.decode_seconds, "peak_bytes": run.peak_bytes,
    }  # fmt: skip
    phases = run.phases
    if phases is None or not phases.num_drafted:
        row["emissions"] = run.emissions[1:]
    else:
        row |= {
            "draft_seconds": phases.draft_seconds, "verify_seconds": phases.verify_seconds,
            "num_drafted": phases.num_drafted, "num_accepted": phases.num_accepted,
        }  # fmt: skip
    return row


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
