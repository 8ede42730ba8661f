"""The command line: help, defaults, and trainings end to end. The guide's and invalid ones have modules of their own."""

import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from sb3_ano.llm import GANOConfig, ShapedPPOConfig
from sb3_ano.llm.cli import main
from tests.llm.tiny import CPU, classifier, prompts, python, tokenizer


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A working directory with a policy, a reward model and data."""
    monkeypatch.chdir(tmp_path)
    classifier(".")
    prompts().to_json("posts/train.jsonl")
    prompts().select(range(8)).to_json("posts/test.jsonl")
    return tmp_path


def test_help_needs_no_trl_and_training_names_the_extra():
    code = "import sys; from sb3_ano.llm.cli import main; assert main(['--help']) == 0; assert 'trl' not in sys.modules\n"
    code += "sys.modules['trl'] = None; assert main(['train', '--help']) == 2"
    done = python("-c", code)
    assert "trl reward --model_name_or_path sft" in done.stdout
    assert done.stderr == "error: trl is not installed; install it with: pip install 'sb3-ano[llm]'\n"


def test_help_on_train_can_be_read(capsys, monkeypatch):
    """Users Z12: 1,222 lines, with the options of this package at both ends and no choices."""
    monkeypatch.setenv("COLUMNS", "100")
    for algo, max_steps in (("ano", 62500), ("grpo", 15625)):
        assert main(["train", "--algo", algo, "--help"]) == 0
        shown = capsys.readouterr().out
        assert f"(default: {max_steps})" in shown
    assert len(shown.splitlines()) < 400
    groups = re.findall(r"^(\w+):$", shown, re.MULTILINE)
    assert groups[-3:] == ["task", "model", "training"]
    defaults = r"--shaping .*\(default: ppo\)", r"same completions\. \(default: 1\)", "pythia-1b-deduped"
    for part in (r"--algo \{ppo,spo,ano,grpo,gano\}", "Example: .* --algo grpo ", *defaults, "trl grpo --help"):
        assert re.search(part, " ".join(shown.split())), part


def test_code_that_comes_with_models_may_run_if_that_is_asked_for(data, monkeypatch):
    """Review B11: the option reached neither the tokenizer nor the reward model."""
    asked = []

    def load(*_, trust_remote_code=False, **__):
        asked.append(trust_remote_code)
        return tokenizer()

    monkeypatch.setattr("sb3_ano.llm.training.load_tokenizer", load)
    monkeypatch.setattr("sb3_ano.llm.rewards.load_tokenizer", load)
    command = ["train", "--dataset_name", "posts", "--model_name_or_path", "model", "--reward_model", "model"]
    assert main([*command, "--trust_remote_code", "True"]) == main(command) == 2  # it is no reward model
    assert asked == [True, True, False, False]


@pytest.mark.filterwarnings("ignore")
def test_policies_are_trained_against_a_reward_model_and_a_function(data, capsys, monkeypatch):
    """Without an accelerator, no option has to say so."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (data / "rewards_here.py").write_text("from llm_task import gold")
    (data / "short.yaml").write_text("max_completion_length: 6\nnum_iterations: 2\ngradient_accumulation_steps: 2\n")
    prompts().select(range(8)).to_json("few.jsonl")

    def train(*arguments: str, model: str = "model") -> None:
        rewards = ["--reward_model", "reward", "--reward_funcs", "rewards_here:gold"]
        few = ["--per_device_train_batch_size", "8"]
        assert main(["train", "--model_name_or_path", model, *rewards, *few, *arguments]) == 0, capsys.readouterr().err

    weights = []
    for algo in ("gano", "grpo", "ano", "spo", "ppo"):
        common = ["--dataset_name", "posts", "--config", "short.yaml", "--max_steps", "3", "--output_dir", algo]
        train("--algo", algo, *common)
        config = torch.load(data / algo / "final" / "training_args.bin", weights_only=False)
        assert (config.num_iterations, config.use_cpu, config.bf16, config.fp16) == (2, True, False, False)
        assert any((data / algo / "runs").rglob("events.out.tfevents.*"))  # TensorBoard's
        assert f"trained with {algo.upper()}" in (data / algo / "README.md").read_text()  # review B5
        assert (data / algo / "critic" / "model.safetensors").is_file() == (algo in ("ano", "spo", "ppo"))
        final = AutoModelForCausalLM.from_pretrained(data / algo / "final")
        weights.append(torch.nn.utils.parameters_to_vector(final.parameters()))
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])
    # Options of TRL that had no effect (review N1 to N3, and evaluations).
    resume = ["--resume_from_checkpoint", "gano/checkpoint-3", "--save_steps", "1", "--save_total_limit", "5"]
    train("--dataset_name", "posts", "--output_dir", "gano", "--max_steps", "4", "--config", "short.yaml", *resume)
    assert {path.name for path in (data / "gano").glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}
    (data / "epoch.yaml").write_text(
        "num_train_epochs: 1\nuse_peft: true\nlora_r: 2\neval_strategy: 'epoch'\ngradient_accumulation_steps: 4\n"
    )
    train("--dataset_name", "few.jsonl", "--output_dir", "lora", "--config", "epoch.yaml", "--dataset_test_split", "train")
    assert (data / "lora/checkpoint-3").is_dir()  # one generation, used three times
    # Review B1: nothing could read the adapter.
    train("--dataset_name", "posts", "--output_dir", "more", "--config", "short.yaml", "--max_steps", "2", model="lora/final")
    adapters = [(data / name / "final/adapter_model.safetensors").read_bytes() for name in ("lora", "more")]
    assert adapters[0] != adapters[1]


def test_the_papers_settings_survive_being_written(tmp_path):
    gano, critic = GANOConfig(str(tmp_path), **CPU), ShapedPPOConfig(str(tmp_path), **CPU)
    for config in (gano, critic):
        assert (config.epsilon, config.learning_rate, config.lr_scheduler_type) == (0.2, 3e-6, "cosine")
        assert (config.beta, config.kl_in, config.max_completion_length, config.temperature) == (0.05, "reward", 53, 0.7)
        assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 64
    assert (gano.shaping, gano.num_generations, gano.num_iterations) == ("ano", 4, 3)
    assert (critic.shaping, critic.num_generations, critic.num_iterations, critic.loss_type) == (None, 1, 4, "bnpo")
    assert (critic.gamma, critic.lam, critic.vf_coef, critic.cliprange_value) == (1.0, 0.95, 0.1, 0.2)
    written = GANOConfig(str(tmp_path), **CPU, shaping="spo", epsilon_high=0.3).to_dict()
    assert (written["shaping"], written["kl_in"], written["epsilon_high"]) == ("spo", "reward", 0.3)
    for size in (3, 2):  # a critic needs no groups
        few = ShapedPPOConfig(str(tmp_path), **CPU, per_device_train_batch_size=size, gradient_accumulation_steps=1)
        assert (few.num_generations, few.num_generations_eval, few.generation_batch_size) == (1, 1, size)
