"""Going on from a checkpoint: the same parameters as without the interruption."""

import json
import os
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
from tests.llm.tiny import SMALL, model, parameters, prompts, reward, tokenizer


def trainer(folder, **settings):
    settings = {**SMALL, "beta": 0.05, "max_steps": 8, "save_strategy": "steps", "save_steps": 1, **settings}
    return GANOTrainer(model(folder), reward, GANOConfig(str(folder), **settings), prompts(), None, tokenizer())


@pytest.mark.parametrize(
    ("step", "settings", "between"),
    [(3, {}, True), (4, {}, False), (5, {}, False), (4, {"steps_per_generation": 4}, False)],
    ids=["between generations", "after one use", "after two uses", "in the middle of a long generation"],
)
def test_every_checkpoint_leads_to_the_same_parameters(step, settings, between, tmp_path):
    whole = trainer(tmp_path, **settings)
    whole.train()
    resumed = trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert torch.equal(parameters(resumed), parameters(whole))
    # What the checkpoint holds is what makes it so.
    (tmp_path / f"checkpoint-{step}" / "rollout_0.pt").unlink()
    without = trainer(tmp_path, **settings)
    without.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert torch.equal(parameters(without), parameters(whole)) == between


def test_a_later_epoch_has_its_own_order_of_prompts_after_a_checkpoint_too(tmp_path):
    """16 prompts are four generations, so that the second epoch begins after twelve updates."""

    def short(**settings):
        args = GANOConfig(str(tmp_path), **{**SMALL, "beta": 0.05, "max_steps": 16, "save_strategy": "steps", **settings})
        return GANOTrainer(model(tmp_path), reward, args, prompts().select(range(16)), None, tokenizer())

    whole = short(save_steps=13)
    whole.train()
    stock = RepeatSampler(range(16), mini_repeat_count=4, batch_size=4, repeat_count=6, seed=1)
    first, second = list(stock), list(stock)
    assert first != second
    assert list(whole._get_train_sampler()) == second  # of the epoch that the training has reached
    resumed = short(save_steps=100)
    assert list(resumed._get_train_sampler()) == first
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-13"))
    assert torch.equal(parameters(resumed), parameters(whole))


def test_checkpoints_that_were_not_written_to_their_end_are_passed_over(tmp_path):
    for name, state in (("checkpoint-2", '{"global_step": 2}'), ("checkpoint-10", '{"glob'), ("checkpoint-9", None)):
        (tmp_path / name).mkdir()
        if state is not None:
            (tmp_path / name / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-x").mkdir()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert last_checkpoint(tmp_path / "nothing") is None


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_same_parameters(tmp_path):
    """``kill -9`` of a process of the command line, at no moment in particular, and the same command with ``--resume``."""
    policy = tmp_path / "model"
    model(tmp_path)
    prompts().save_to_disk(str(tmp_path / "data"))
    (tmp_path / "my_rewards.py").write_text(
        "def varied(completion_ids, **_):\n    return [sum(7 * token % 11 for token in ids) / 10 for ids in completion_ids]\n"
    )

    def command(out: Path, *more: str) -> list[str]:
        settings = {**SMALL, "max_steps": 60, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 3}
        settings |= {"model": policy, "dataset": tmp_path / "data", "output_dir": out, "reward_function": "my_rewards:varied"}
        options = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        return [sys.executable, "-m", "sb3_ano.llm", "train", *options, *more]

    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    subprocess.run(command(whole), env=environment, check=True, capture_output=True, timeout=300)
    process = subprocess.Popen(command(cut), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while last_checkpoint(cut) is None or int(last_checkpoint(cut).name.split("-")[1]) < 10:
        assert time.monotonic() < deadline
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (cut / "final").exists()
    refused = subprocess.run(command(cut), env=environment, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    assert "holds a training; --resume goes on with it" in refused.stderr
    subprocess.run(command(cut, "--resume"), env=environment, check=True, capture_output=True, timeout=300)
    assert (cut / "final/model.safetensors").read_bytes() == (whole / "final/model.safetensors").read_bytes()
    assert json.loads((cut / "final/config.json").read_text())["model_type"] == "gpt_neox"
