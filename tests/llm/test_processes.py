"""Two processes against one, on the same completions; resumed against uninterrupted, also with another number of processes."""

from pathlib import Path

import pytest
import torch

from tests.llm.tiny import classifier, model, python

# A group is as large as a generation, so that two processes hold half of it each. Completions depend on the prompt and on
# which of its group it is, so that they are the same on any number of processes.
SCRIPT = """
import os, sys
import torch
from tests.llm.tiny import SMALL, critic_trainer, make, parameters, tokenizer
from sb3_ano.llm import GANOConfig, GANOTrainer

folder, out, processes = sys.argv[1], sys.argv[2], int(os.environ.get("WORLD_SIZE", 1))
algo, loss_type = sys.argv[3].split("-")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
torch.set_num_threads(1)
settings = {"beta": 0.3, "max_steps": 6, "num_generations": 16, "gradient_accumulation_steps": 1, "save_steps": 4,
            "per_device_train_batch_size": 16 // processes, "ddp_find_unused_parameters": False, "loss_type": loss_type,
            # Adam divides by the size of a gradient: with TRL's 1e-8, those next to 0 show rounding as differences of a step.
            "save_strategy": "steps", "output_dir": out, "adam_epsilon": 1e-4}

def rollout(prompts, trainer):
    completions = []
    for row, prompt in enumerate(prompts):
        member = (trainer.accelerator.process_index * len(prompts) + row) % 16
        generator = torch.Generator().manual_seed(sum(map(ord, prompt)) * 16 + member + trainer.state.global_step)
        completions.append(torch.randint(3, 30, (3 + member % 5,), generator=generator).tolist() + [0])
    return {"prompt_ids": tokenizer()(text=prompts)["input_ids"], "completion_ids": completions, "logprobs": None}

for checkpoint in (None, out + "/checkpoint-4", *sys.argv[4:]):
    if algo == "ano":  # in two processes, each update also has two passes, of which one averages gradients
        settings["gradient_accumulation_steps"] = 2
        settings["per_device_train_batch_size"] = 8 // processes
        trainer = critic_trainer(folder, named={"rollout_func": rollout}, **settings)
    else:
        trainer = make(folder, GANOTrainer, GANOConfig, named={"rollout_func": rollout}, **settings)
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.accelerator.is_main_process:
        result = {"parameters": parameters(trainer), "log": trainer.state.log_history}
        torch.save(result, {None: out + ".pt", out + "/checkpoint-4": out + "_resumed.pt"}.get(checkpoint, out + "_other.pt"))
"""


def run(tmp_path: Path, processes: int, kind: str, *checkpoints: Path) -> tuple[dict, dict, str]:
    script, out = tmp_path / "script.py", tmp_path / f"{processes}_{kind}"
    script.write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    done = python(*launch, script, tmp_path, out, kind, *checkpoints)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(f"{out}.pt"), torch.load(f"{out}_resumed.pt"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gano-grpo", "gano-dapo", "ano-dapo"])
def test_two_processes_are_one_also_after_resumption(kind, tmp_path):
    """Parameters, and what is reported: the divergence in the reward, ratios and their extremes, and the critic's loss."""
    before = torch.nn.utils.parameters_to_vector(model(tmp_path).parameters()).detach()
    classifier(tmp_path)
    one, resumed_one, _ = run(tmp_path, 1, kind)
    two, resumed_two, errors = run(tmp_path, 2, kind, tmp_path / f"1_{kind}" / "checkpoint-4")
    # Review B3: a checkpoint of one process made two wait for each other for ever.
    assert "checkpoint-4 was written with num_processes=1, per_device_train_batch_size=" in errors
    other = torch.load(tmp_path / f"2_{kind}_other.pt")
    assert other["log"][-1]["step"] == 6
    assert (other["parameters"] - one["parameters"]).abs().max() < 0.1
    assert (len(one["parameters"]) > len(before)) == kind.startswith("ano")  # the critic's follow
    moved = (one["parameters"][: len(before)] - before).norm()
    assert moved > 0.01
    assert (two["parameters"] - one["parameters"]).norm() < 1e-5 * moved
    # Means over forward passes depend on which completions a pass has.
    ratios = ("ratio/mean", "ratio/max", "ratio/outside_high", "approx_kl", "kl")
    compared = ("reward", "rewards/kl/mean", *(ratios if kind.startswith("gano") else ()))
    for first, second in zip(one["log"][:-1], two["log"][:-1], strict=True):
        for name in first.keys() & {*compared}:
            assert second[name] == pytest.approx(first[name], rel=1e-3, abs=1e-5), name
    assert any(abs(entry.get("rewards/kl/mean", 0.0)) > 1e-3 for entry in one["log"])
    assert any(entry.get("ratio/outside_high", 0.0) > 0 for entry in one["log"])
    assert torch.equal(resumed_one["parameters"], one["parameters"])
    assert torch.equal(resumed_two["parameters"], two["parameters"])  # review B2: two processes could not resume
