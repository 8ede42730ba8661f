"""The command line: refusals in one line, and each command end to end on the small task."""

import json
import subprocess
import sys

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import RewardConfig, SFTConfig

from sb3_ano.llm import GANOConfig, task
from sb3_ano.llm.arguments import Source, parse
from sb3_ano.llm.cli import main
from tests.llm.tiny import model, prompts, tokenizer

FEW = ["--max_steps", "3", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1"]
FEW += ["--gradient_checkpointing", "False", "--disable_tqdm", "True", "--save_strategy", "no", "--report_to", "none"]


@pytest.fixture
def data(tmp_path):
    model(tmp_path)
    prompts().save_to_disk(str(tmp_path / "posts"))
    task.make_comparisons(32, seed=0).save_to_disk(str(tmp_path / "pairs"))
    return tmp_path


def complaint(capsys, *arguments) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("error: ")
    return said[-1]


def test_help_needs_no_trl():
    code = "import sys; from sb3_ano.llm.cli import main; assert main(['--help']) == 0; assert 'trl' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for command in ("sft", "reward", "train", "generate", "demo"):
        assert f"\n  {command}" in shown


@pytest.mark.parametrize("command", ["sft", "reward", "train", "generate", "demo"])
def test_each_command_shows_its_options(command, capsys):
    assert main([command, "--help"]) == 0
    assert {"generate": "--max_new_tokens", "demo": "--seeds"}.get(command, "--learning_rate") in capsys.readouterr().out


def test_bad_input_is_one_clear_line(data, capsys):
    out = ["--output_dir", data / "out", *FEW]
    assert "unknown command 'trian', did you mean 'train'?" in complaint(capsys, "trian")
    policy = ["--model", data / "model"]
    said = complaint(capsys, "sft", "--model", "someone/nothing", "--dataset", data / "posts", *out)
    assert "model='someone/nothing' is no local folder, and cannot be downloaded" in said
    assert "no column 'completion'" in complaint(capsys, "sft", *policy, "--dataset", data / "pairs", *out)
    assert "no column 'chosen', 'rejected'" in complaint(capsys, "reward", *policy, "--dataset", data / "posts", *out)
    train = ["train", *policy, "--dataset", data / "posts", *out]
    assert "give --reward_model or --reward_function" in complaint(capsys, *train)
    assert "algo='ppo' is not allowed; allowed are gano, grpo" in complaint(capsys, *train, "--algo", "ppo")
    assert "reward_function='nowhere:it' cannot be imported" in complaint(capsys, *train, "--reward_function", "nowhere:it")
    assert "no reward model: it lacks score.weight" in complaint(capsys, *train, "--reward_model", data / "model")
    assert "unknown option '--epsilonn'" in complaint(capsys, *train, "--epsilonn", "0.3")
    assert "epsilon=-1.0 is not a radius" in complaint(capsys, *train, "--epsilon", "-1")
    assert "temperature=-1.0 is not allowed" in complaint(
        capsys, "generate", *policy, "--dataset", data / "posts", "--temperature", "-1"
    )
    assert "seeds=0 is not allowed" in complaint(capsys, "demo", "--seeds", "0")
    assert not (data / "out").exists()


def test_without_an_accelerator_no_option_is_needed(data, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    needed = ["--dataset", str(data / "posts"), "--output_dir", str(data / "out")]
    for command, config in (("sft", SFTConfig), ("reward", RewardConfig), ("train", GANOConfig)):
        _, settings = parse(command, Source, config, needed, {})
        assert (settings.use_cpu, settings.bf16, settings.fp16) == (True, False, False)
    _, settings = parse("sft", Source, SFTConfig, [*needed, "--bf16", "True"], {})
    assert settings.bf16


def test_an_empty_prompt_is_found_before_anything_is_trained(data, capsys):
    datasets.Dataset.from_dict({"prompt": ["a", ""], "completion": ["b", "c"]}).save_to_disk(str(data / "holes"))
    said = complaint(capsys, "sft", "--model", data / "model", "--dataset", data / "holes", "--output_dir", data / "out", *FEW)
    assert "split 'train', has an empty prompt in row 1" in said


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_fine_tuned_rewarded_trained_and_asked(data, capsys):
    def run(*arguments):
        assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err

    run("sft", "--model", data / "model", "--dataset", data / "posts", "--output_dir", data / "sft", *FEW)
    run("reward", "--model", data / "sft/final", "--dataset", data / "pairs", "--output_dir", data / "reward", *FEW)
    assert AutoModelForSequenceClassification.from_pretrained(data / "reward/final").config.num_labels == 1
    against = ["--reward_model", data / "reward/final", "--reward_function", "sb3_ano.llm.task:gold"]
    source = ["--model", data / "sft/final", "--dataset", data / "posts", *against, "--max_completion_length", "6"]
    for algo in ("gano", "grpo"):
        run("train", "--algo", algo, *source, "--output_dir", data / algo, *FEW)
    run("train", *source, "--output_dir", data / "lora", "--lora_r", "2", *FEW)
    assert (data / "lora/final/adapter_config.json").is_file()
    first, second = (AutoModelForCausalLM.from_pretrained(data / algo / "final") for algo in ("gano", "grpo"))
    assert any(not a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))

    out = data / "written" / "completions.jsonl"
    asked = [
        "--model",
        data / "gano/final",
        "--dataset",
        data / "posts",
        "--split",
        "train",
        "--limit",
        "5",
        "--max_new_tokens",
        "4",
    ]
    run("generate", *asked, "--batch_size", "2", "--out", out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == prompts()["prompt"][:5]
    assert all(len(tokenizer()(row["completion"])["input_ids"]) <= 4 for row in rows)


@pytest.mark.slow
def test_the_demo_goes_on_where_it_stopped_without_a_network(tmp_path):
    """In a network namespace without interfaces, where that is allowed."""
    isolated = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode != 0:
        isolated = []
    command = [
        *isolated,
        sys.executable,
        "-m",
        "sb3_ano.llm",
        "demo",
        "--quick",
        "--seeds",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    first = subprocess.run([*command, "--algos", "gano"], capture_output=True, text=True, timeout=400)
    assert first.returncode == 0, first.stderr
    kept = (tmp_path / "out/runs/gano_0.json").stat().st_mtime_ns
    second = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert second.returncode == 0, second.stderr
    assert (tmp_path / "out/runs/gano_0.json").stat().st_mtime_ns == kept
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert list(report["summary"]) == ["grpo", "gano", "spo"]
    assert (tmp_path / "out/report.png").stat().st_size > 10_000
    other = subprocess.run([arg for arg in command if arg != "--quick"], capture_output=True, text=True, timeout=400)
    assert other.returncode == 2
    assert "holds results of other settings" in other.stderr
