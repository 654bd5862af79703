"""What goes out with an exit: its model card, and what the hub gets."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfspec.cli import app
from selfspec.model import EarlyExitModel
from selfspec.storage import SIDECAR, WEIGHTS, load_exits, save_exit, upload
from selfspec.target import Target
from tests.conftest import build_model
from tests.test_storage import trained_exit

FILES = ["README.md", "adapter_config.json", WEIGHTS, SIDECAR]
METRICS = {
    "loss": 2.1, "calibration_error": 0.031, "speedup": 1.17, "agreement_1": 0.5, "agreement_2": 0.4, "tau_1": 1.5,
    "tau_2": 1.7, "acceptance_1": 0.52, "acceptance_2": 0.55,
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What a hub that takes everything was asked."""
    calls: list[tuple[object, ...]] = []

    class Api:
        def create_repo(self, repo_id: str, **kwargs: object) -> None:
            calls.append((repo_id, kwargs))

        def upload_folder(self, repo_id: str, folder_path: str, path_in_repo: str | None, **_: object) -> None:
            calls.append((repo_id, path_in_repo, sorted(p.name for p in Path(folder_path).rglob("*.*"))))

    monkeypatch.setattr("selfspec.storage.HfApi", Api)
    return calls


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = Target(build_model("llama"))
    training = {"num_steps": 40, "config": {"loss": "kl", "epochs": 4}, "data": {"prompts_sha256": "ab12"}}
    return save_exit(trained_exit(target), target, tmp_path / "small", training=training, metrics=METRICS)


def test_only_exits_go_to_the_hub(folder: Path, hub: list[tuple[object, ...]]) -> None:
    """push_to_hub makes the repository and uploads one folder per exit; no base weight is among the files."""
    target = Target(build_model("llama"))
    EarlyExitModel(target, load_exits(target, folder)).push_to_hub("me/exits", private=True)
    assert hub == [("me/exits", {"private": True, "exist_ok": True}), ("me/exits", "small", FILES)]


def test_of_a_run_only_its_exits_go_to_the_hub(folder: Path, hub: list[tuple[object, ...]]) -> None:
    """Not its data, states and checkpoints; a single exit becomes the repository itself."""
    (folder.parent / "checkpoints").mkdir()
    (folder.parent / "checkpoints" / "weights.safetensors").touch()
    upload(folder.parent, "me/exits")
    upload(folder, "me/exit")
    assert [call for call in hub if len(call) == 3] == [("me/exits", "small", FILES), ("me/exit", None, FILES)]


def test_a_hub_that_refuses_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        def create_repo(self, *_: object, **__: object) -> None:
            raise RuntimeError("401 Client Error\n\nInvalid credentials")

    monkeypatch.setattr("selfspec.storage.HfApi", Api)
    with pytest.raises(OSError, match=r"cannot upload .*small to me/exit: 401 Client Error; the exit itself is saved"):
        upload(folder, "me/exit")


def test_a_bad_hub_id_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.training.run.train_exits", lambda *_: pytest.fail("trained"))
    made = CliRunner().invoke(app, ["train-exits", "--push-to-hub", "no owner"])
    assert (made.exit_code, made.stderr) == (2, "selfspec: 'no owner' is not a hub id (owner/name)\n")


def test_the_model_card_tells_what_the_sidecar_knows(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\nbase_model: llama\n")
    assert "| draft step | 1 | 2 |" in card
    assert "| right, given that all before were | 0.520 | 0.550 |" in card
    assert "* calibration error: 0.031" in card
    assert "token by token, each through layers 1 to 1 and the exit" in card
    assert "77 tokens" in card
    for told in ("loss: kl", "epochs: 4", "prompts_sha256: ab12", "* num steps: 40"):
        assert told in card
    assert "agrees with the target" in card
    assert "None" not in card
