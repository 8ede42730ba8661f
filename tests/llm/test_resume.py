"""Resumption from checkpoints: the same parameters as without the interruption."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from trl.trainer.utils import RepeatSampler

from sb3_ano.llm import GANOConfig, GANOTrainer
from sb3_ano.llm.resume import last_checkpoint
from tests.llm.tiny import SMALL, classifier, critic_trainer, environment, make, parameters, prompts


def trainer(folder, critic=False, **settings):
    settings = {"beta": 0.05, "max_steps": 8, "save_strategy": "steps", "save_steps": 1, **settings}
    return critic_trainer(folder, **settings) if critic else make(folder, GANOTrainer, GANOConfig, **settings)


def resumed(folder, step, **settings) -> torch.Tensor:
    ours = trainer(folder, **settings)
    ours.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    return parameters(ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "settings", "between"),
    [(3, {}, True), (4, {}, False), (5, {}, False), (4, {"steps_per_generation": 4}, False), (5, {"critic": True}, False)],
    ids=["between generations", "after one use", "after two uses", "in the middle of a long generation", "with a critic"],
)
def test_every_checkpoint_leads_to_the_same_parameters(step, settings, between, tmp_path):
    whole = trainer(tmp_path, **settings)
    whole.train()
    assert torch.equal(resumed(tmp_path, step, **settings), parameters(whole))
    # What the checkpoint holds is what makes it so.
    (tmp_path / f"checkpoint-{step}" / "rollout_0.pt").unlink()
    assert torch.equal(resumed(tmp_path, step, **settings), parameters(whole)) == between


def test_completions_that_fit_no_batch_are_generated_again(tmp_path):
    """Review B4: parts of a batch in a training with other batches were an IndexError."""
    trainer(tmp_path, max_steps=4).train()
    with pytest.warns(UserWarning, match="written with gradient_accumulation_steps=2, steps_per_generation=2; completions"):
        resumed(tmp_path, 4, max_steps=5, gradient_accumulation_steps=4)
    with pytest.warns(UserWarning, match="checkpoint-4 was written with shaping=ano; completions are"):  # review N7
        resumed(tmp_path, 4, max_steps=5, shaping="spo")
    (tmp_path / "checkpoint-4" / "rollout_0.pt").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="rollout_0.pt is damaged, or holds more than tensors; remove it"):
        resumed(tmp_path, 4)


def test_a_later_epoch_has_its_own_order_of_prompts_after_a_checkpoint_too(tmp_path):
    """16 prompts are four generations, so that the second epoch begins after twelve updates."""
    short = {"data": prompts().select(range(16)), "max_steps": 16}
    whole = trainer(tmp_path, save_steps=13, **short)
    whole.train()
    stock = RepeatSampler(range(16), mini_repeat_count=4, batch_size=4, repeat_count=6, seed=1)
    first, second = list(stock), list(stock)
    assert first != second
    assert list(whole._get_train_sampler()) == second  # of the epoch that the training has reached
    assert list(trainer(tmp_path, **short)._get_train_sampler()) == first
    assert torch.equal(resumed(tmp_path, 13, save_steps=100, **short), parameters(whole))


def test_checkpoints_that_were_not_written_to_their_end_are_passed_over(tmp_path):
    for name, state in (("checkpoint-2", '{"global_step": 2}'), ("checkpoint-10", '{"glob'), ("checkpoint-9", None)):
        (tmp_path / name).mkdir()
        if state is not None:
            (tmp_path / name / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-x").mkdir()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert last_checkpoint(tmp_path / "nothing") is None


@pytest.mark.slow
def test_a_killed_training_resumes_to_the_same_parameters(tmp_path):
    """``kill -9`` of a process of the command line, at no moment in particular, and the same command with ``--resume``."""
    classifier(tmp_path)
    prompts().save_to_disk(str(tmp_path / "data"))
    settings = {**SMALL, "max_steps": 60, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 3, "algo": "ano"}
    settings |= {"model_name_or_path": "model", "value_model": "reward", "dataset_name": "data"}
    settings |= {"reward_funcs": "tests.llm.tiny:reward"}
    options = [part for key, value in settings.items() for part in (f"--{key}", str(value))]

    def start(out: Path, *more: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "sb3_ano.llm", "train", *options, "--output_dir", str(out), *more]
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=environment(), cwd=tmp_path, **streams)

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finished, killed = start(whole), start(cut)
    deadline = time.monotonic() + 200
    while last_checkpoint(cut) is None or int(last_checkpoint(cut).name.split("-")[1]) < 10:
        assert time.monotonic() < deadline
        assert killed.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (cut / "final").exists()
    for process in (finished, start(cut, "--resume")):
        assert process.communicate(timeout=300)[1] is not None
        assert process.returncode == 0
    for name in ("final/model.safetensors", "critic/model.safetensors"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name
