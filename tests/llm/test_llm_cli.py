"""The command line: help, one line for bad input, and trainings end to end."""

import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXForSequenceClassification

import sb3_ano
from sb3_ano.llm.cli import main
from tests.llm.tiny import llm_task, model, prompts, python, tokenizer


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A working directory with a policy, a reward model and data."""
    monkeypatch.chdir(tmp_path)
    model(".")
    GPTNeoXForSequenceClassification.from_pretrained("model", num_labels=1).save_pretrained("scores")
    tokenizer().save_pretrained("scores")
    prompts().to_json("posts/train.jsonl")
    llm_task.make_comparisons(32, seed=0).to_json("pairs/train.jsonl")
    return tmp_path


def test_help_needs_no_trl_and_training_names_the_extra():
    code = "import sys; from sb3_ano.llm.cli import main; assert main(['--help']) == 0; assert 'trl' not in sys.modules\n"
    code += "sys.modules['trl'] = None; assert main(['train', '--help']) == 2"
    done = python("-c", code)
    assert "trl reward --model_name_or_path sft" in done.stdout
    assert done.stderr == "error: trl is not installed; install it with: pip install 'sb3-ano[llm]'\n"


@pytest.mark.slow
def test_language_models_need_neither_sb3_nor_gymnasium():
    code = (
        "import sys, types; sys.modules['stable_baselines3'] = None; sys.modules['gymnasium'] = None\n"
        "package = types.ModuleType('sb3_ano'); package.__path__ = [sys.argv[1]]; sys.modules['sb3_ano'] = package\n"
        "from sb3_ano.llm import *; print(GANOTrainer.__name__, train.__name__)"
    )
    assert python("-c", code, *sb3_ano.__path__).stdout == "GANOTrainer train\n"


def test_help_on_train_can_be_read(capsys, monkeypatch):
    """Users Z12: 1,222 lines, with the options of this package at both ends and no choices."""
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["train", "--algo", "grpo", "--help"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 400
    for expected in (
        r"--algo \{gano,grpo\}",
        "added by sb3_ano",
        r"--shaping .*\(default: ppo\)",
        r"same completions\. \(default: 1\)",
        r"\bvllm_mode\b",
    ):
        assert re.search(expected, shown), expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", "unknown command 'trian', did you mean 'train'?"),
        ("train --dataset posts", "nothing is rewarded; give --reward_model or --reward_function"),
        ("train --algo ppo", "argument --algo: invalid choice: 'ppo' (choose from 'gano', 'grpo')"),
        ("train --reward_model scores", "give --dataset"),
        ("train --dataset posts --reward_model scores --epsilonn 0.3", "unknown option '--epsilonn'"),
        ("train --dataset posts --reward_model scores --epsilon -1", "epsilon=-1.0 is not a radius"),
        ("train --dataset posts --reward_model scores --model someone/nothing", "model 'someone/nothing' cannot be loaded"),
        ("train --dataset posts --reward_model model --model model", "'model' is not a reward model: it lacks score.weight"),
        (
            "train --dataset posts --model model --reward_function nowhere:it",
            "reward_function='nowhere:it' cannot be imported",
        ),
        ("train --dataset posts --reward_model scores --output_dir old", "'old' holds a training; add --resume"),
        ("train --dataset posts --reward_model scores --config grpo.yaml", "give --algo on the command line"),
        # Users Z13: this asked the Hub for the model first.
        ("train --model nowhere --dataset nofile.json --output_dir x", "dataset='nofile.json' does not exist"),
    ],
    ids=lambda value: value[-30:],
)
def test_bad_input_is_one_clear_line(arguments, message, data, capsys):
    (data / "old" / "checkpoint-1").mkdir(parents=True)
    (data / "grpo.yaml").write_text("algo: grpo\n")
    assert main(arguments.split()) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[-1].startswith("error: ")
    assert message in errors[-1]
    assert not (data / "trainer_output").exists()


@pytest.mark.filterwarnings("ignore")
def test_policies_are_trained_against_a_reward_model_and_a_function(data, capsys, monkeypatch):
    """Without an accelerator, no option has to say so."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (data / "rewards_here.py").write_text("from llm_task import gold")
    (data / "short.yaml").write_text("max_completion_length: 6\nnum_iterations: 2\n")
    prompts().select(range(8)).to_json("few.jsonl")

    def train(*arguments: str) -> None:
        rewards = ["--reward_model", "scores", "--reward_function", "rewards_here:gold"]
        few = ["--per_device_train_batch_size", "8", "--report_to", "none"]
        assert main(["train", "--model", "model", *rewards, *few, *arguments]) == 0, capsys.readouterr().err

    for algo in ("gano", "grpo"):
        train("--dataset", "posts", "--algo", algo, "--config", "short.yaml", "--max_steps", "3", "--output_dir", algo)
        assert torch.load(data / algo / "final" / "training_args.bin", weights_only=False).num_iterations == 2
    first, second = (AutoModelForCausalLM.from_pretrained(data / algo / "final") for algo in ("gano", "grpo"))
    assert any(not a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert "GANO" in (data / "gano" / "README.md").read_text()
    assert "GANO" not in (data / "grpo" / "README.md").read_text()  # review B5
    # Options of TRL that had no effect (review N1 to N3).
    resume = ["--resume_from_checkpoint", "gano/checkpoint-3", "--save_steps", "1", "--save_total_limit", "5"]
    train("--dataset", "posts", "--output_dir", "gano", "--max_steps", "4", *resume)
    assert {path.name for path in (data / "gano").glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}
    train("--dataset", "few.jsonl", "--output_dir", "lora", "--lora_r", "2", "--num_train_epochs", "1")
    assert (data / "lora/checkpoint-3").is_dir()  # one generation, used three times
    assert (data / "lora/final/adapter_config.json").is_file()


@pytest.mark.slow
def test_the_documented_commands_lead_from_a_base_model_to_a_policy(data):
    """``trl sft``, ``trl reward``, and ours, each with its output directory as the next one's input."""
    cpu = ["--use_cpu", "--bf16", "False", "--max_steps", "3", "--per_device_train_batch_size", "8", "--report_to", "none"]
    for command in (
        "trl.cli.main sft --model_name_or_path model --dataset_name posts --output_dir sft",
        "trl.cli.main reward --model_name_or_path sft --dataset_name pairs --output_dir reward",
        "sb3_ano.llm train --model sft --reward_model reward --dataset posts --output_dir gano --max_completion_length 6",
    ):
        done = python("-m", *command.split(), *cpu)
        assert done.returncode == 0, done.stderr[-2000:]
    assert (data / "gano/final/model.safetensors").is_file()
