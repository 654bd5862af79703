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

folder, is_shared = Path(sys.argv[1]), sys.argv[2] == "fsdp"
more = {"gradient_accumulation_steps": 2 // ranks.num_processes(), "logging_steps": 2}
trainer.TrainingArguments = lambda **made: TrainingArguments(**(made | more))
# less than an epoch, in which the order of rows is the same
config = settings(folder, form="parallel", correction_rank=4, max_steps=4, save_steps=2, fsdp=is_shared)
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
"""


def train(folder: Path, kind: str) -> Path:
    """Run the script with one process, or with two that share ("fsdp") or do not share ("ddp") the weights."""
    (folder / "script.py").write_text(SCRIPT)
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
    """Losses, checkpoints, saved exits and metrics; a run that goes on from its first checkpoint ends there, too."""
    two = train(tmp_path, kind)
    assert len(losses(one)) == 2
    assert losses(one) == pytest.approx(losses(two), abs=2e-4)
    expected = weights(one / "checkpoints" / "checkpoint-4")
    for run in (tmp_path / "first", two):
        found = weights(run / "checkpoints" / "checkpoint-4")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)
        for name, tensor in weights(one / "exit").items():
            torch.testing.assert_close(weights(run / "exit")[name], tensor, rtol=1e-2, atol=1e-2)  # kept in bfloat16
        metrics = [json.loads((folder / "metrics.json").read_text())["metrics"] for folder in (one, run)]
        assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], abs=1e-3)
