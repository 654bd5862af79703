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
import sys
from pathlib import Path
from transformers import TrainingArguments
from selfspec.target import Target
from selfspec.training import ranks, trainer
from selfspec.training.run import train_on_rows
from tests.test_training import VOCAB, build, settings, written_rows

folder, form = Path(sys.argv[1]), sys.argv[2]
more = {"gradient_accumulation_steps": 2 // ranks.num_processes(), "logging_steps": 2}
trainer.TrainingArguments = lambda **made: TrainingArguments(**(made | more))
is_parallel = form == "parallel"
config = settings(
    folder, form=form, num_steps=1 + is_parallel, correction_rank=4 * is_parallel, max_steps=4, save_steps=2
)  # less than an epoch, in which the order of rows is the same
ranks.join(is_cpu=True)
train_on_rows(Target(build()), written_rows(build(), 40), config, folder, VOCAB)
"""


def start(folder: Path, form: str, num_processes: int) -> subprocess.Popen[str]:
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    command = [
        sys.executable,
        *(many if num_processes > 1 else []),
        str(folder / "script.py"),
        str(folder / "run"),
        form,
    ]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("form", ["chain", "parallel"])
def test_two_processes_train_the_same_weights(tmp_path: Path, form: str) -> None:
    runs = {n: start(tmp_path / str(n), form, n) for n in (1, 2)}
    for process in runs.values():
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said[-3000:]
    one, two = (tmp_path / str(n) / "run" for n in (1, 2))
    losses = []
    for run in (one, two):
        newest = run / "checkpoints" / "checkpoint-4"
        state = json.loads((newest / "trainer_state.json").read_text())
        losses.append([entry["loss"] for entry in state["log_history"] if "loss" in entry])
    assert losses[0]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    weights = [load_file(run / "checkpoints" / "checkpoint-4" / "trained_state.safetensors") for run in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=1e-4)
    metrics = [json.loads((run / "metrics.json").read_text())["metrics"] for run in (one, two)]
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], abs=1e-3)
