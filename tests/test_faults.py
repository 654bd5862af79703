"""What a training run survives: signals, kill -9 while saving, a full disk, damaged checkpoints, NaN, other data."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from selfspec.target import Target
from selfspec.training.checkpoints import SEAL, check_facts, newest_whole, seal
from selfspec.training.run import claim, train_on_rows
from selfspec.training.stopping import StopRequests
from selfspec.training.trainer import ExitTrainer, NonFiniteLossError
from tests.test_training import VOCAB, build, settings, written_rows

SCRIPT = """
import os, signal, sys
from pathlib import Path
from selfspec.target import Target
from selfspec.training import trainer
from selfspec.training.run import train_on_rows
from tests.test_training import VOCAB, build, settings, written_rows

folder, what = Path(sys.argv[1]), sys.argv[2]
made = trainer.seal

def seal(path, facts):
    if what == "kill" and path.name == "checkpoint-4":
        os.kill(os.getpid(), signal.SIGKILL)
    made(path, facts)

trainer.seal = seal
config = settings(folder, max_steps=6 if what == "kill" else 100_000, save_steps=2)
train_on_rows(Target(build()), written_rows(build(), 30), config, folder, VOCAB)
"""


PARENT = """
import multiprocessing, os, time
from selfspec.training.workers import leave_with_parent

def work():
    leave_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(600)

multiprocessing.get_context("fork").Process(target=work).start()
time.sleep(600)
"""


def start(folder: Path, what: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), what], env=environment, stderr=subprocess.PIPE, text=True
    )


def train(folder: Path, **changes: object) -> list[int]:
    """Train on; the steps that were made."""
    steps, original = [], ExitTrainer.compute_loss

    def counted(self: ExitTrainer, *args: object, **kwargs: object) -> torch.Tensor:
        steps.append(self.state.global_step)
        return original(self, *args, **kwargs)

    rows = written_rows(build(), 30)[: changes.pop("num_rows", 30)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExitTrainer, "compute_loss", counted)
        train_on_rows(Target(build()), rows, settings(folder, save_steps=2, **changes), folder, VOCAB)
    return steps


def whole(folder: Path) -> str | None:
    found = newest_whole(folder / "checkpoints")
    return None if found is None else found[0].name


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_first_signal_saves_and_ends_the_run_which_goes_on_from_there(tmp_path, number, code):
    process = start(tmp_path, "run")
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("checkpoints/checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (code, -number), said  # SIGINT ends an uncaught interrupt by the signal itself
    assert "saving after this step" in said
    name = whole(tmp_path)
    assert name is not None
    step = int(name.split("-")[1])
    assert train(tmp_path, max_steps=step + 2) == [step, step + 1]


def test_a_second_signal_acts_at_once():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of a parallel test run ignore it
    try:
        with StopRequests() as requests:
            os.kill(os.getpid(), signal.SIGINT)
            assert requests.signal == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_killed_while_saving_the_run_goes_on_from_the_checkpoint_before(tmp_path, caplog):
    process = start(tmp_path, "kill")
    assert process.wait(timeout=120) == -signal.SIGKILL
    assert (tmp_path / "checkpoints" / "checkpoint-4").is_dir()
    assert train(tmp_path, max_steps=6) == [2, 3, 4, 5]
    assert "checkpoint-4 is passed over: it was not finished" in caplog.text


def test_workers_end_with_a_parent_that_was_killed():
    """Several of them would otherwise keep a model each in memory, for nobody."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        worker.wait(timeout=30)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    """Files may not grow beyond a few bytes while the second checkpoint is written."""
    limits, original = resource.getrlimit(resource.RLIMIT_FSIZE), ExitTrainer._save

    def save(self: ExitTrainer, *args: object, **kwargs: object) -> None:
        if self.state.global_step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        original(self, *args, **kwargs)

    monkeypatch.setattr(ExitTrainer, "_save", save)
    try:
        with pytest.raises(OSError, match=r"checkpoint-4 could not be written \(.*too large"):
            train(tmp_path, max_steps=6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "checkpoints").glob("checkpoint-*")] == ["checkpoint-2"]
    assert train(tmp_path, max_steps=6) == [2, 3, 4, 5]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "removed", "no seal", "broken seal"])
def test_a_damaged_checkpoint_is_passed_over_with_a_notice(tmp_path, caplog, damage):
    for step in (2, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "state").write_bytes(b"weights" * 100)
        seal(folder, {"rows": "abc"})
    state, sealed = (tmp_path / "checkpoint-10" / name for name in ("state", SEAL))
    assert newest_whole(tmp_path) == (tmp_path / "checkpoint-10", {"rows": "abc"})
    if damage == "truncated":
        os.truncate(state, 100)
    elif damage == "flipped":
        state.write_bytes(b"W" + state.read_bytes()[1:])
    elif damage == "broken seal":
        os.truncate(sealed, 20)
    else:
        (state if damage == "removed" else sealed).unlink()
    assert newest_whole(tmp_path) == (tmp_path / "checkpoint-2", {"rows": "abc"})
    assert "checkpoint-10 is passed over" in caplog.text


def test_a_loss_that_is_not_finite_stops_the_run_and_spoils_nothing(tmp_path, monkeypatch):
    original = ExitTrainer.compute_loss

    def compute_loss(self: ExitTrainer, *args: object, **kwargs: object) -> torch.Tensor:
        return original(self, *args, **kwargs) * (float("nan") if self.state.global_step == 3 else 1.0)

    monkeypatch.setattr(ExitTrainer, "compute_loss", compute_loss)
    with pytest.raises(NonFiniteLossError, match=r"the loss is nan at step 3: lower learning_rate \(0\.0"):
        train(tmp_path, max_steps=6)
    monkeypatch.undo()
    assert whole(tmp_path) == "checkpoint-2"
    assert train(tmp_path, max_steps=6) == [2, 3, 4, 5]


def test_a_run_does_not_go_on_with_other_data_unless_forced(tmp_path):
    train(tmp_path, max_steps=2)
    with pytest.raises(ValueError, match=r"checkpoint-2 belongs to a run with other rows: \w+ -> \w+: .*force=true"):
        train(tmp_path, max_steps=4, num_rows=20)
    assert train(tmp_path, max_steps=4, num_rows=20, force=True) == [2, 3]


def test_other_versions_are_said(tmp_path, caplog):
    check_facts(tmp_path, {"rows": 1, "versions": {"torch": "1"}}, {"rows": 1, "versions": {"torch": "2"}})
    assert "torch 1 -> 2" in caplog.text
    with pytest.raises(ValueError, match="processes: 1 -> 2"):
        check_facts(tmp_path, {"processes": 1}, {"processes": 2})


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(FileExistsError, match="link is a link"):
        claim(settings(tmp_path / "link"))
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionError, match="file is a file"):
        claim(settings(tmp_path / "file" / "run"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(PermissionError, match="real is read-only"):
        claim(settings(tmp_path / "real" / "run"))
