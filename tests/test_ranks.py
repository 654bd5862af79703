"""One run of several processes, as torchrun starts them, is the run of one process with as many rows a step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = """
import runpy
import shutil
import sys
from pathlib import Path
import torch
from transformers import TrainingArguments
from selfspec.storage import save_exit
from selfspec.target import Target
from selfspec.training import ranks, trainer
from selfspec.training.run import train_on_rows
from tests.test_training import VOCAB, build, settings, written_rows

folder, kind = Path(sys.argv[1]), sys.argv[2]
more = {"gradient_accumulation_steps": 2 // ranks.num_processes(), "logging_steps": 2}
trainer.TrainingArguments = lambda **made: TrainingArguments(**(made | more))
# less than an epoch, in which the order of rows is the same
config = settings(folder, form="parallel", correction_rank=4, max_steps=4, save_steps=2, fsdp=kind == "fsdp")
ranks.join(is_cpu=True)
target, rows = Target(build()), written_rows(build(), 40)

def train():
    torch.manual_seed(not ranks.is_main())  # as if rank 0 had drawn more
    train_on_rows(
        target, rows, config, folder, VOCAB,
        lambda head, *_: save_exit(head, target, folder / "exit"),
    )

train()
if ranks.num_processes() > 1:
    ranks.wait()
    if ranks.is_main():
        shutil.copytree(folder, folder.with_name("first"))
        shutil.rmtree(folder / "checkpoints" / "checkpoint-4")
    ranks.wait()
    train()
if kind == "ddp":
    runpy.run_path(Path(sys.argv[0]).with_name("together.py"), {"folder": folder, "more": more, "config": config})
"""

TOGETHER = """
import json
import torch
from selfspec.exits import ExitHead
from selfspec.model import EarlyExitModel
from selfspec.pretrained import load_target_model
from selfspec.storage import fingerprint, load_exits, save_exit
from selfspec.target import Target
from selfspec.training import ranks
from selfspec.training.batch import write_batch
from selfspec.training.run import train_exits, train_on_rows
from tests.conftest import chat_model
from tests.test_training import VOCAB, build, settings, written_rows

source, more["gradient_accumulation_steps"] = folder.with_name("model"), 2  # all processes take the same rows
if ranks.is_main():
    chat_model().base.save_pretrained(source)
    chat_model().tokenizer.save_pretrained(source)
    build().save_pretrained(source / "small")
    chat_model().tokenizer.save_pretrained(source / "small")
    (source / "prompts.jsonl").write_text("".join(json.dumps({"prompt": "ab" * i}) + "\\n" for i in range(1, 9)))
ranks.wait()
plan = {"distributed_config": {"tp_plan": "auto"}}

# as one process trains
base, _ = load_target_model(source / "small", dtype="float32", **plan)
target, plain = Target(base), EarlyExitModel(Target(build()))
assert target.is_split and not target.fused.is_in_use and not plain.target.is_split
assert fingerprint(base) == fingerprint(plain.base)
run = folder.with_name("tp")
train_on_rows(
    target, written_rows(build(), 40), config.model_copy(update={"output": str(run)}), run, VOCAB,
    lambda head, *_: save_exit(head, target, run / "exit"),
)

# as one process writes
ranks.wait()
model, ids = EarlyExitModel(target, load_exits(target, run / "exit")), torch.tensor([[1, 5, 9, 17, 33]])
model.exits["layer-2"] = ExitHead.untrained(target, 2)
for more_settings in ({}, {"temperature": 1.0, "seed": 3}, {"exact": True}):
    expected = plain.generate(ids, draft="off", max_new_tokens=12, **more_settings).sequences.tolist()
    for drafting in ({"draft": "off"}, {"exit": "exit", "draft_len": 3}, {"exit": "layer-2", "draft_len": 2}):
        assert model.generate(ids, max_new_tokens=12, **drafting, **more_settings).sequences.tolist() == expected
torch.manual_seed(ranks.rank())
texts = [None, None]
sampled = model.generate(ids, max_new_tokens=12, temperature=1.0, exit="layer-2").sequences.tolist()
torch.distributed.all_gather_object(texts, sampled)
assert texts[0] == texts[1]
batches = [
    write_batch(t, [[5, 6, 7], [8, 9]], torch.tensor([0.0, 0.8]), 8, torch.Generator().manual_seed(1), [2], [1])
    for t in (target, plain.target)
]
assert [w.answer for w in batches[0]] == [w.answer for w in batches[1]]

# the whole command, from nothing
run = folder.with_name("whole")
data = {"num_tokens": 24, "prompts": str(source / "prompts.jsonl"), "batch_size": 4, "max_new_tokens": 6}
train_exits(settings(run, model=str(source), dtype="float32", load=plan, max_steps=1, draft_len=None, data=data))
"""


def train(folder: Path, kind: str) -> Path:
    """Run the script with one process, or with two that share ("fsdp") or do not share ("ddp") the weights."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "together.py").write_text(TOGETHER)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    many = [] if kind == "one" else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *many, str(folder / "script.py"), str(folder / kind), kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / kind


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("ranks"), "one")


def losses(run: Path) -> list[float]:
    state = json.loads((run / "checkpoints" / "checkpoint-4" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def weights(path: Path) -> dict[str, torch.Tensor]:
    (file,) = path.glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_the_same_weights(tmp_path: Path, one: Path, kind: str) -> None:
    """Losses, checkpoints, saved exits and metrics; a run that goes on from its first checkpoint ends there, too.

    In the same processes, a target that they hold together (tensor parallelism) trains as one process alone, writes
    one process's texts, and goes through the whole command.
    """
    two = train(tmp_path, kind)
    assert len(losses(one)) == 2
    assert losses(one) == pytest.approx(losses(two), abs=2e-4)
    expected = weights(one / "checkpoints" / "checkpoint-4")
    together = [tmp_path / "tp"] if kind == "ddp" else []
    for run in (tmp_path / "first", two, *together):
        found = weights(run / "checkpoints" / "checkpoint-4")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            loose = 10 if run in together else 1  # the target's sums are in another order, and kept in bfloat16
            torch.testing.assert_close(found[name], tensor, rtol=1e-3 * loose, atol=1e-4 * loose)
        for name, tensor in weights(one / "exit").items():
            torch.testing.assert_close(weights(run / "exit")[name], tensor, rtol=1e-2, atol=1e-2)  # kept in bfloat16
        metrics = [json.loads((folder / "metrics.json").read_text())["metrics"] for folder in (one, run)]
        assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], abs=1e-3)
    if together:
        assert losses(one) == pytest.approx(losses(together[0]), abs=2e-4)
        assert (tmp_path / "whole" / "exit" / "adapter_model.safetensors").is_file()
        assert len((tmp_path / "whole" / "data" / "manifest.json").read_text()) > 0
