"""The command line: help, one line for bad input, and trainings end to end."""

import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from sb3_ano.llm.cli import main
from tests.llm.tiny import classifier, llm_task, prompts, python


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A working directory with a policy, a reward model and data."""
    monkeypatch.chdir(tmp_path)
    classifier(".")
    prompts().to_json("posts/train.jsonl")
    prompts().select(range(8)).to_json("posts/test.jsonl")
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
    """Review B18."""
    code = (
        "import sys; sys.modules['stable_baselines3'] = None; sys.modules['gymnasium'] = None\n"
        "from sb3_ano.llm import *; print(ANOTrainer.__name__, train.__name__)"
    )
    assert python("-c", code).stdout == "ANOTrainer train\n"


@pytest.mark.parametrize(
    ("algo", "expected"),
    [
        ("grpo", (r"--shaping .*\(default: ppo\)", r"same completions\. \(default: 1\)", r"\bvllm_mode\b")),
        ("spo", (r"--vf_coef [^-]*\(default: 0\.1\)", r"same completions\. \(default: 4\)", r"--value_model")),
    ],
)
def test_help_on_train_can_be_read(algo, expected, capsys, monkeypatch):
    """Users Z12: 1,222 lines, with the options of this package at both ends and no choices."""
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["train", "--algo", algo, "--help"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 400
    groups = re.findall(r"^(\w+):$", shown, re.MULTILINE)
    assert groups[-3:] == ["task", "model", "training"]
    for part in (r"--algo \{ppo,spo,ano,grpo,gano\}", f"Example: .* --algo {algo} ", *expected):
        assert re.search(part, " ".join(shown.split())), part


GIVEN = "train --dataset_name posts --reward_model reward --model model "


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", "unknown command 'trian', did you mean 'train'?"),
        ("train --dataset_name posts", "nothing is rewarded; give --reward_model or --reward_funcs"),
        ("train --algo dpo", "argument --algo: invalid choice: 'dpo' (choose from 'ppo', 'spo', 'ano', 'grpo', 'gano')"),
        ("train --reward_model reward", "give --dataset_name"),
        (GIVEN + "--epsilonn 0.3", "unknown option '--epsilonn'"),
        (GIVEN + "--epsilon -1", "epsilon=-1.0 is not a radius"),
        (GIVEN + "--algo ano --gamma 2", "gamma=2.0 is not allowed; allowed are numbers from 0 to 1"),
        (GIVEN + "--algo spo --shaping ano", "shaping='ano' is not allowed with SPOTrainer, whose shape is 'spo'"),
        (GIVEN + "--value_model reward", "value_model has no effect with algo='gano', which has no critic"),
        (GIVEN + "--lora_alpha 4", "lora_alpha has no effect without LoRA; add --use_peft"),  # review N3
        (GIVEN + "--dataset_test_split test", "dataset_test_split='test' has no effect without --eval_strategy"),  # N5
        (GIVEN + "--output_dir done --resume", "'done' has no checkpoint to resume from, only the final model"),  # N6
        (GIVEN + "--max_steps 0", "max_steps=0 trains nothing"),  # N9
        (GIVEN + "--output_dir x --resume_from_checkpoint nowhere", "nowhere"),  # N1
        (GIVEN + "--output_dir old", "'old' holds a training; add --resume"),
        (GIVEN + "--config grpo.yaml", "give --algo on the command line"),
        (GIVEN + "--model someone/nothing", "model 'someone/nothing' cannot be loaded"),
        ("train --dataset posts --reward_model model --model model", "'model' is not a reward model: it lacks score.weight"),
        ("train --dataset posts --model model --reward_funcs nowhere:it", "reward_funcs='nowhere:it' cannot be imported"),
        ("train --dataset posts --model model --reward_funcs it", "reward_funcs='it' cannot be imported"),
        ("train --dataset posts --model model --algo ano --reward_funcs llm_task:gold", "give value_model"),
        # Users Z13: this asked the Hub for the model first.
        ("train --model nowhere --dataset nofile.json --output_dir x", "dataset_name='nofile.json' does not exist"),
    ],
    ids=lambda value: value[-30:],
)
def test_bad_input_is_one_clear_line(arguments, message, data, capsys):
    (data / "old" / "checkpoint-1").mkdir(parents=True)
    (data / "done" / "final").mkdir(parents=True)
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
    (data / "short.yaml").write_text("max_completion_length: 6\nnum_iterations: 2\ngradient_accumulation_steps: 2\n")
    prompts().select(range(8)).to_json("few.jsonl")

    def train(*arguments: str, model: str = "model") -> None:
        rewards = ["--reward_model", "reward", "--reward_funcs", "rewards_here:gold"]
        few = ["--per_device_train_batch_size", "8", "--report_to", "none"]
        assert main(["train", "--model_name_or_path", model, *rewards, *few, *arguments]) == 0, capsys.readouterr().err

    for algo in ("gano", "grpo", "ano", "spo", "ppo"):
        common = ["--dataset_name", "posts", "--config", "short.yaml", "--max_steps", "3", "--output_dir", algo]
        train("--algo", algo, *common)
        assert torch.load(data / algo / "final" / "training_args.bin", weights_only=False).num_iterations == 2
        name = algo.upper()
        assert f"trained with {name}" in (data / algo / "README.md").read_text()  # review B5
        assert (data / algo / "critic" / "model.safetensors").is_file() == (algo in ("ano", "spo", "ppo"))
    weights = [
        torch.nn.utils.parameters_to_vector(AutoModelForCausalLM.from_pretrained(data / algo / "final").parameters())
        for algo in ("gano", "grpo", "ano", "spo", "ppo")
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])
    # Options of TRL that had no effect (review N1 to N3, and evaluations).
    resume = ["--resume_from_checkpoint", "gano/checkpoint-3", "--save_steps", "1", "--save_total_limit", "5"]
    train("--dataset", "posts", "--output_dir", "gano", "--max_steps", "4", "--config", "short.yaml", *resume)
    assert {path.name for path in (data / "gano").glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}
    (data / "epoch.yaml").write_text(
        "num_train_epochs: 1\nlora_r: 2\neval_strategy: 'epoch'\ngradient_accumulation_steps: 4\n"
    )
    train("--dataset", "few.jsonl", "--output_dir", "lora", "--config", "epoch.yaml", "--dataset_test_split", "train")
    assert (data / "lora/checkpoint-3").is_dir()  # one generation, used three times
    # Review B1: nothing could read the adapter.
    train("--dataset", "posts", "--output_dir", "more", "--config", "short.yaml", "--max_steps", "2", model="lora/final")
    adapters = [(data / name / "final/adapter_model.safetensors").read_bytes() for name in ("lora", "more")]
    assert adapters[0] != adapters[1]


@pytest.mark.slow
def test_the_documented_commands_lead_from_a_base_model_to_a_policy(data):
    """``trl sft``, ``trl reward``, and ours, each with its output directory as the next one's input."""
    cpu = ["--use_cpu", "--bf16", "False", "--max_steps", "3", "--per_device_train_batch_size", "8", "--report_to", "none"]
    for command in (
        "trl.cli.main sft --model_name_or_path model --dataset_name posts --output_dir sft",
        "trl.cli.main reward --model_name_or_path sft --dataset_name pairs --output_dir rm",
        "sb3_ano.llm train --algo ano --model sft --reward_model rm --dataset posts --output_dir ano --max_steps 3",
    ):
        done = python("-m", *command.split(), *cpu)
        assert done.returncode == 0, done.stderr[-2000:]
    assert (data / "ano/final/model.safetensors").is_file()
