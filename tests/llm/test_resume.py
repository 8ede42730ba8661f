"""Resumption from checkpoints: the same parameters as without the interruption, also with another number of processes."""

import shutil
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl.trainer.utils import RepeatSampler

from sb3_ano.llm import GANOConfig, GANOTrainer, training
from sb3_ano.llm.resume import last_checkpoint, load_weights
from tests.common import python, variables
from tests.llm.tiny import SMALL, classifier, critic_trainer, make, model, parameters, prompts


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


@pytest.mark.parametrize("critic", [False, True])
def test_the_best_model_is_a_whole_checkpoint(critic, tmp_path):
    ours = trainer(tmp_path, critic, max_steps=3, load_best_model_at_end=True, eval_strategy="steps", eval_steps=1)
    scores = iter([3.0, 2.0, 1.0, 0.0])
    ours.evaluate = lambda *_, **__: {"eval_loss": -next(scores)}  # the first one is the best
    ours.train()
    assert ours.state.best_model_checkpoint.endswith("checkpoint-1")
    best = tmp_path / "checkpoint-1"
    kinds = [(ours.model, AutoModelForCausalLM, best)]
    kinds += [(ours.critic.model, AutoModelForSequenceClassification, best / "critic")] if critic else []
    for found, kind, directory in kinds:
        expected = kind.from_pretrained(directory).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())


@pytest.mark.parametrize("settings", [{"max_steps": 2}, {"max_steps": -1, "num_train_epochs": 0.1}])
@pytest.mark.parametrize("critic", [False, True])
def test_a_training_that_has_reached_its_end_is_saved_and_not_continued(critic, settings, tmp_path):
    ours = trainer(tmp_path, critic, lr_scheduler_type="constant", **settings)
    training.run(ours)
    checkpoints = sorted(tmp_path.glob("checkpoint-*"))
    shutil.rmtree(tmp_path / "final")  # killed between the last checkpoint and this
    for _ in range(2):
        again = trainer(tmp_path, critic, lr_scheduler_type="constant", **settings)
        training.run(again, resume=True)
        assert torch.equal(parameters(again), parameters(ours))
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "final").state_dict()
        assert all(torch.equal(value, saved[name]) for name, value in ours.model.state_dict().items())
        (tmp_path / "final" / "notes.txt").touch()  # which stays
        modes = {path.stat().st_mode for name in ("final", "critic") for path in (tmp_path / name).glob("*") if path.is_file()}
        assert modes == {(tmp_path / "final" / "notes.txt").stat().st_mode}
    assert (tmp_path / "final" / "notes.txt").exists()
    assert {path.name for path in tmp_path.iterdir() if path.name[0] == "."} == set()
    assert sorted(tmp_path.glob("checkpoint-*")) == checkpoints


def test_a_checkpoint_of_models_only_has_the_critic(tmp_path):
    trainer(tmp_path, critic=True, max_steps=1, save_only_model=True).train()
    files = {str(path.relative_to(tmp_path / "checkpoint-1")) for path in (tmp_path / "checkpoint-1").rglob("*")}
    assert {"model.safetensors", "critic/model.safetensors"} <= files
    assert "rollout_0.pt" not in files


def test_parameters_of_two_types_are_loaded_without_loss(tmp_path):
    mixed = model(tmp_path, noise=0.01).bfloat16()
    mixed.lm_head.float().weight.data.add_(1e-4)
    mixed.save_pretrained(tmp_path / "mixed")
    other = model(tmp_path).bfloat16()
    other.lm_head.float()
    load_weights(other, tmp_path / "mixed")
    for name, value in mixed.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_completions_that_fit_no_batch_are_generated_again(tmp_path):
    """Parts of a batch in a training with other batches were an IndexError."""
    trainer(tmp_path, max_steps=4).train()
    with pytest.warns(UserWarning, match="written with gradient_accumulation_steps=2, steps_per_generation=2; completions"):
        resumed(tmp_path, 4, max_steps=5, gradient_accumulation_steps=4)
    with pytest.warns(UserWarning, match="checkpoint-4 was written with shaping=ano; completions are"):
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
def test_a_killed_training_resumes_to_the_same_parameters(data):
    """``kill -9`` of a process of the command line, at no moment in particular, and the same command with ``--resume``."""
    settings = {**SMALL, "max_steps": 60, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 3, "algo": "ano"}
    settings |= {"model_name_or_path": "model", "value_model": "reward", "dataset_name": "posts"}
    settings |= {"reward_funcs": "tests.llm.tiny:reward"}
    options = [part for key, value in settings.items() for part in (f"--{key}", str(value))]

    def start(out, *more):
        command = [sys.executable, "-m", "sb3_ano.llm", "train", *options, "--output_dir", str(out), *more]
        return subprocess.Popen(command, env=variables())

    whole, cut = data / "whole", data / "cut"
    finished, killed = start(whole), start(cut)
    deadline = time.monotonic() + 200
    while last_checkpoint(cut) is None or int(last_checkpoint(cut).name.split("-")[1]) < 10:
        assert time.monotonic() < deadline
        assert killed.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    assert not (cut / "final").exists()
    assert [process.wait(300) for process in (finished, start(cut, "--resume"))] == [0, 0]
    for name in ("final/model.safetensors", "critic/model.safetensors"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name


# A group is as large as a generation, so that two processes hold half of it each. Completions depend on the prompt and on
# which of its group it is, so that they are the same on any number of processes.
SCRIPT = """
import os, sys
import torch
from tests.llm.tiny import critic_trainer, make, parameters, tokenizer
from sb3_ano.llm import GANOConfig, GANOTrainer

folder, out, processes = sys.argv[1], sys.argv[2], int(os.environ.get("WORLD_SIZE", 1))
algo, loss_type = sys.argv[3].split("-")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
torch.set_num_threads(1)
passes = 2 if algo == "ano" else 1  # so that in two processes, too, each update has passes of which one averages gradients
settings = {"beta": 0.3, "max_steps": 6, "num_generations": 16, "gradient_accumulation_steps": passes, "save_steps": 4,
            "per_device_train_batch_size": 16 // passes // processes, "ddp_find_unused_parameters": False,
            # Adam divides by the size of a gradient: with TRL's 1e-8, those next to 0 show rounding as differences of a step.
            "loss_type": loss_type, "save_strategy": "steps", "output_dir": out, "adam_epsilon": 1e-4}

def rollout(prompts, trainer):
    completions = []
    for row, prompt in enumerate(prompts):
        member = (trainer.accelerator.process_index * len(prompts) + row) % 16
        generator = torch.Generator().manual_seed(sum(map(ord, prompt)) * 16 + member + trainer.state.global_step)
        completions.append(torch.randint(3, 30, (3 + member % 5,), generator=generator).tolist() + [0])
    return {"prompt_ids": tokenizer()(text=prompts)["input_ids"], "completion_ids": completions, "logprobs": None}

for number, checkpoint in enumerate((None, out + "/checkpoint-4", *sys.argv[4:])):
    settings["named"] = {"rollout_func": rollout}
    trainer = critic_trainer(folder, **settings) if algo == "ano" else make(folder, GANOTrainer, GANOConfig, **settings)
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.accelerator.is_main_process:
        torch.save({"parameters": parameters(trainer), "log": trainer.state.log_history}, f"{out}_{number}.pt")
"""


def run(tmp_path, processes, kind, *checkpoints):
    """Results of the training, of its resumption, and of others from checkpoints; and what was written to standard error."""
    script, out = tmp_path / "script.py", tmp_path / f"{processes}_{kind}"
    script.write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    done = python(*launch, script, tmp_path, out, kind, *checkpoints)
    assert done.returncode == 0, done.stderr[-3000:]
    return [*(torch.load(f"{out}_{number}.pt") for number in range(2 + len(checkpoints))), done.stderr]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gano-grpo", "gano-dapo", "ano-dapo"])
def test_two_processes_are_one_also_after_resumption(kind, tmp_path):
    """Parameters, and what is reported: the divergence in the reward, ratios and their extremes, and the critic's loss."""
    before = torch.nn.utils.parameters_to_vector(model(tmp_path).parameters()).detach()
    classifier(tmp_path)
    one, resumed_one, _ = run(tmp_path, 1, kind)
    two, resumed_two, other, errors = run(tmp_path, 2, kind, tmp_path / f"1_{kind}" / "checkpoint-4")
    # A checkpoint of one process made two wait for each other for ever.
    assert "checkpoint-4 was written with num_processes=1, per_device_train_batch_size=" in errors
    assert other["log"][-1]["step"] == 6
    assert (other["parameters"] - one["parameters"]).abs().max() < 0.1
    assert (len(one["parameters"]) > len(before)) == kind.startswith("ano")  # the critic's follow
    moved = (one["parameters"][: len(before)] - before).norm()
    assert moved > 0.01
    assert (two["parameters"] - one["parameters"]).norm() < 1e-5 * moved
    # Means over forward passes depend on which completions a pass has.
    ratios = ("ratio/mean", "ratio/max", "ratio/outside_high", "ratio/kl", "kl")
    compared = ("reward", "rewards/kl/mean", *(ratios if kind.startswith("gano") else ()))
    for first, second in zip(one["log"][:-1], two["log"][:-1], strict=True):
        for name in first.keys() & {*compared}:
            assert second[name] == pytest.approx(first[name], rel=1e-3, abs=1e-5), name
    assert any(abs(entry.get("rewards/kl/mean", 0.0)) > 1e-3 for entry in one["log"])
    assert any(entry.get("ratio/outside_high", 0.0) > 0 for entry in one["log"])
    assert torch.equal(resumed_one["parameters"], one["parameters"])
    assert torch.equal(resumed_two["parameters"], two["parameters"])  # two processes could not resume
