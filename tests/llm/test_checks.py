"""Trainings that would train nothing, or something else than they say: dropout, frozen policies, rewards, columns."""

import asyncio
import itertools
import json
import re
import subprocess
import sys
import time

import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import GRPOConfig, GRPOTrainer

from sb3_ano import _secrets
from sb3_ano._secrets import MASK
from sb3_ano.llm import ANOTrainer, GANOConfig, GANOTrainer, PPOTrainer, ShapedGRPOConfig, ShapedGRPOTrainer, ShapedPPOConfig
from sb3_ano.llm.grpo import disable_dropout, random_parts
from tests.common import ROOT
from tests.llm.tiny import (
    SMALL,
    SMALL_CRITIC,
    classifier,
    critic_trainer,
    make,
    model,
    parameters,
    prompts,
    reward,
    rollout,
    tokenizer,
)

TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
#: Models with dropout in modules, in functions, in the attention, over layers, and read from the configuration.
MODELS = {
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128},
    "OPT": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 64,
        "max_position_embeddings": 128,
        "attention_dropout": 0.2,
    },
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.2, "attention_dropout": 0.2},
    "GPTJ": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 128,
        "rotary_dim": 8,
        "attn_pdrop": 0.2,
        "embd_pdrop": 0.2,
        "resid_pdrop": 0.2,
    },
    "Llama": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attention_dropout": 0.2,
    },
}


def directory_of(name: str, folder) -> str:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=len(tokenizer()), **TOKENS, **MODELS[name])
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    made.save_pretrained(folder / "dropping")
    tokenizer().save_pretrained(folder / "dropping")
    return str(folder / "dropping")


def trained(trainer):
    trainer.train()
    return trainer


def ratios(trainer) -> list[float]:
    """All that is logged of ratios and divergences, in a training at learning rate 0."""
    names = ("ratio/mean", "ratio/max", "ratio/outside_low", "ratio/outside_high", "ratio/kl", "kl", "rewards/kl/mean")
    lines = [line for line in trained(trainer).state.log_history if "ratio/max" in line]
    assert len(lines) == 3
    return [abs(line[name] - (name in names[:2])) for line in lines for name in names if name in line]


@pytest.mark.parametrize("name", MODELS)
def test_models_with_dropout_have_ratios_of_1_until_they_change(name, tmp_path):
    """At learning rate 0. With dropout, and the same settings otherwise, they do not."""
    directory = directory_of(name, tmp_path)
    settings = {**SMALL, "beta": 0.05, "max_steps": 3, "learning_rate": 0.0, "output_dir": str(tmp_path / "out")}

    def gano(**more):
        return GANOTrainer(directory, reward, GANOConfig(**settings, **more), prompts(), None, tokenizer())

    assert max(ratios(gano())) < 1e-4
    with pytest.warns(UserWarning, match="the policy has dropout, so that the ratio is not 1"):
        dropping = gano(disable_dropout=False)
    assert max(ratios(dropping)) > 0.01


def test_layers_are_no_longer_dropped():
    config = transformers.OPTConfig(vocab_size=9, dropout=0.0, layerdrop=0.5, **MODELS["OPT"])
    made = AutoModelForCausalLM.from_config(config).train()
    tokens = torch.arange(8).unsqueeze(0)
    outputs = [made(input_ids=tokens, use_cache=False).logits for _ in range(9)]
    assert any(not torch.equal(output, outputs[0]) for output in outputs)
    disable_dropout(made)
    outputs = [made(input_ids=tokens, use_cache=False).logits for _ in range(9)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert made.config.layerdrop == 0.5


@pytest.mark.parametrize("trainer_class", [ANOTrainer, PPOTrainer])
def test_critic_policy_and_adapter_are_without_dropout(trainer_class, tmp_path):
    """The critic starts as a model with dropout, whose configuration is kept in what is saved."""
    directory = directory_of("GPT2", tmp_path)
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1).save_pretrained(tmp_path / "value")
    tokenizer().save_pretrained(tmp_path / "value")
    args = ShapedPPOConfig(**{**SMALL_CRITIC, "max_steps": 3, "learning_rate": 0.0, "output_dir": str(tmp_path / "out")})
    adapter = LoraConfig(r=2, lora_dropout=0.3, fan_in_fan_out=True, target_modules=["c_attn"], task_type="CAUSAL_LM")
    for peft_config in (None, adapter):
        trainer = trainer_class(
            directory, reward, args, prompts(), None, tokenizer(), peft_config=peft_config, value_model=str(tmp_path / "value")
        )
        assert not random_parts(trainer.model)
        assert not random_parts(trainer.critic)
        assert peft_config is not None or not random_parts(trainer.ref_model)
        assert max(ratios(trainer)) < 1e-4
        losses = [line["critic/loss"] for line in trainer.state.log_history if "critic/loss" in line]
        assert losses[0] == pytest.approx(losses[2], rel=1e-3)  # of the same completions
    trainer.save_critic(tmp_path / "critic")
    assert json.loads((tmp_path / "critic" / "config.json").read_text())["resid_pdrop"] == 0.1
    whole = trainer_class(directory, reward, args, prompts(), None, tokenizer(), value_model=str(tmp_path / "value"))
    whole.save_model(str(tmp_path / "final"))
    assert json.loads((tmp_path / "final" / "config.json").read_text())["attn_pdrop"] == 0.1
    assert not random_parts(whole.model)


@pytest.mark.filterwarnings("ignore:the policy has dropout")
@pytest.mark.parametrize("disabled", [True, False])
def test_a_training_with_ppos_shape_is_trls_with_dropout_and_without(disabled, tmp_path):
    directory = directory_of("GPT2", tmp_path)
    settings = {**SMALL, "output_dir": str(tmp_path), "max_steps": 4, "disable_dropout": disabled}
    ours = ShapedGRPOTrainer(directory, reward, ShapedGRPOConfig(**settings, shaping="ppo"), prompts(), None, tokenizer())
    ours.train()
    stock = GRPOTrainer(directory, reward, GRPOConfig(**settings), prompts(), None, tokenizer())
    assert torch.equal(parameters(ours), parameters(trained(stock)))


MAKERS = {
    "critic": lambda folder, **options: critic_trainer(folder, ANOTrainer, **options),
    "gano": lambda folder, **options: make(folder, GANOTrainer, GANOConfig, **options),
    "grpo": lambda folder, **options: make(folder, ShapedGRPOTrainer, ShapedGRPOConfig, **options),
}


@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_frozen_policy_is_one_line(maker, beta, tmp_path, monkeypatch):
    base = model(tmp_path)
    get_peft_model(base, LoraConfig(r=2, target_modules=["query_key_value"], task_type="CAUSAL_LM")).save_pretrained(
        tmp_path / "a"
    )
    settings = {"beta": beta, "kl_in": "reward" if beta else "loss"}
    for trainable in (False, True):
        adapted = PeftModel.from_pretrained(model(tmp_path), str(tmp_path / "a"), is_trainable=trainable)
        monkeypatch.setattr("tests.llm.tiny.model", lambda *_, adapted=adapted: adapted)
        if trainable:
            MAKERS[maker](tmp_path, **settings)
        else:
            with pytest.raises(
                ValueError, match=r"no parameter of the policy can be trained, because all are frozen; load an"
            ):
                MAKERS[maker](tmp_path, **settings)
        monkeypatch.undo()


@pytest.mark.parametrize("maker", MAKERS)
def test_a_policy_that_is_not_in_the_optimizer_is_one_line(maker, tmp_path):
    classifier(tmp_path)
    other = torch.optim.AdamW(model(tmp_path).parameters())  # of a copy
    critic = {"value_model": str(tmp_path / "reward")} if maker == "critic" else {}
    with pytest.raises(ValueError, match="the optimizer has no parameter of the policy that can be trained; make it of the"):
        MAKERS[maker](tmp_path, named={"optimizers": (other, None)}, **critic)


def test_a_frozen_critic_is_trained_all_the_same(tmp_path):
    start = AutoModelForSequenceClassification.from_pretrained(classifier(tmp_path)).requires_grad_(False)
    trainer = critic_trainer(tmp_path, value_model=start, max_steps=2)
    before = torch.nn.utils.parameters_to_vector(trainer.critic.parameters()).detach().clone()
    trainer.train()
    assert not torch.equal(torch.nn.utils.parameters_to_vector(trainer.critic.parameters()), before)
    assert not any(parameter.requires_grad for parameter in start.parameters())


def rewards_of(values):
    return lambda prompts, **_: [value for _, value in zip(prompts, itertools.cycle(values), strict=False)]


async def slow(**_):
    await asyncio.sleep(60)


async def infinite(prompts, **_):
    return [float("-inf")] * len(prompts)


REWARDS = {
    "minus infinity": (rewards_of([1.0, float("-inf"), 2.0]), r"a reward is infinite; allowed are finite.*returned -inf"),
    "infinity": (rewards_of([float("inf"), 1.0]), "a reward is infinite; .*returned inf"),
    "too large for float32": (rewards_of([1e300, 1.0]), "a reward is infinite; .*in float32"),
    "asynchronous": (infinite, "a reward is infinite; .*'infinite' returned -inf"),
    "nothing": (lambda **_: None, "returned a NoneType; allowed is a list with a number per completion, or None"),
    "text": (lambda **_: "many", "returned a str; allowed is"),
    "texts": (rewards_of(["good"]), "returned 'good' for a completion; allowed is"),
    "pairs": (rewards_of([[1.0]]), r"returned \[1.0\] for a completion; allowed is"),
    "too few": (lambda **_: [1.0], "returned 1 rewards for 16 completions"),
    "late": (lambda **_: time.sleep(60), "has not returned after 0.5 seconds; if it waits for a server"),
    "late, asynchronous": (slow, "reward function 'slow' has not returned after 0.5 seconds"),
}


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize("maker", MAKERS)
def test_rewards_that_teach_nothing_are_the_same_error_in_all_trainers(maker, kind, tmp_path):
    function, message = REWARDS[kind]
    trainer = MAKERS[maker](tmp_path, reward=function, reward_timeout=0.5 if "late" in kind else 60.0)
    with pytest.raises((ValueError, TimeoutError), match=message):
        rollout(trainer)


@pytest.mark.parametrize("values", [[1.0], [0.0], [None], [float("nan")], [None, 2.0, None, None]], ids=str)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.filterwarnings("ignore:All reward functions")
def test_rewards_that_are_all_equal_are_one_warning_in_all_trainers(maker, values, tmp_path):
    trainer = MAKERS[maker](tmp_path, reward=rewards_of(values))
    with pytest.warns(UserWarning, match=r"all rewards of (each group|a generation) are equal or missing"):
        rollout(trainer)
    rollout(trainer)  # without another warning, which would be an error


@pytest.mark.parametrize("maker", MAKERS)
def test_arrays_tensors_and_numbers_of_other_types_are_rewards(maker, tmp_path):
    expected = None
    for convert in (
        list,
        torch.tensor,
        lambda values: torch.tensor(values).numpy(),
        lambda values: iter(map(torch.tensor, values)),
    ):
        torch.manual_seed(0)
        trainer = MAKERS[maker](tmp_path, reward=lambda convert=convert, **given: convert(reward(**given)))
        advantages = rollout(trainer)["advantages"]
        expected = advantages if expected is None else expected
        assert torch.equal(advantages, expected)


@pytest.mark.parametrize("column", ["prompts", "completions", "trainer_state", "log_metric", "environments", "self"])
@pytest.mark.parametrize("maker", MAKERS)
def test_columns_with_names_of_arguments_are_named_before_anything_runs(maker, column, tmp_path):
    data = prompts().add_column(column, ["x"] * len(prompts()))
    with pytest.raises(
        ValueError, match=f"train_dataset has a column '{column}', which is the name of an argument that reward"
    ):
        MAKERS[maker](tmp_path, data=data)


def test_columns_of_evaluations_are_checked_too(tmp_path):
    wrong = Dataset.from_dict({"prompt": ["a"] * 8, "completions": ["b"] * 8})
    for evaluated in (wrong, {"one": prompts(), "two": wrong}):
        name = "two" if isinstance(evaluated, dict) else "eval_dataset"
        with pytest.raises(ValueError, match=f"{name} has a column 'completions'"):
            GANOTrainer(model(tmp_path), reward, GANOConfig(str(tmp_path), **SMALL), prompts(), evaluated, tokenizer())


def test_reward_functions_that_do_not_take_what_they_get_are_named_before_anything_runs(tmp_path):
    def narrow(completions):
        return [1.0] * len(completions)

    def solved(completions, solution, **_):
        return [float(text == right) for text, right in zip(completions, solution, strict=True)]

    with pytest.raises(ValueError, match=r"'narrow': got an unexpected keyword argument 'completion_ids'; it gets"):
        make(tmp_path, GANOTrainer, GANOConfig, reward=narrow)
    with pytest.raises(ValueError, match="'solved': missing a required argument: 'solution'; it gets completion_ids, "):
        make(tmp_path, GANOTrainer, GANOConfig, reward=solved)
    data = prompts().add_column("solution", ["x"] * len(prompts()))
    make(tmp_path, GANOTrainer, GANOConfig, reward=solved, data=data)
    with pytest.raises(ValueError, match="'solved': missing a required argument: 'solution'"):  # which TRL removes
        make(tmp_path, GANOTrainer, GANOConfig, reward=solved, data=data, remove_unused_columns=True)


def test_settings_are_written_and_logged_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setattr(_secrets, "_remembered", set())
    secret = {"hub_token": "hf_secret-12345", "vllm_server_base_url": "http://me:hunter2@host:8000"}
    args = GANOConfig(str(tmp_path), **{**SMALL, **secret}, model_init_kwargs={"token": "hf_other-67890"})
    assert args.hub_token == secret["hub_token"]
    assert args.to_dict()["vllm_server_base_url"] == f"http://{MASK}@host:8000"
    torch.save(args, tmp_path / "training_args.bin")
    written = (tmp_path / "training_args.bin").read_bytes().decode(errors="replace")
    for text in (args.to_json_string(), str(args.to_sanitized_dict()), written):
        assert not re.search("secret-12345|hunter2|other-67890", text)


WRONG = """
from sb3_ano.llm import ANOTrainer, GANOTrainer, ShapedGRPOTrainer, ShapedPPOConfig, ShapedPPOTrainer

ANOTrainer()  # no model
GANOTrainer("sft", train_datset=None)  # misspelled
ShapedGRPOTrainer("sft", "reward", shaping=3.0)  # no shape
ShapedPPOTrainer("sft", "reward", valu_model="x")  # misspelled
ShapedPPOConfig(gamma="high")  # no number
"""
RIGHT = """
from collections.abc import Callable

from sb3_ano.llm import ANOTrainer, GANOConfig, GANOTrainer, ShapedGRPOTrainer, ShapedPPOConfig

rewards: list[Callable[..., list[float]]] = []
ANOTrainer("sft", "reward", ShapedPPOConfig("out", max_steps=3, gamma=0.9), value_model="sft").train()
GANOTrainer("sft", rewards, GANOConfig("out", num_iterations=2), callbacks=[], shaping="spo")
ShapedGRPOTrainer("sft", ["reward", rewards[0]], shaping=lambda x: x)
"""


@pytest.mark.slow
def test_mypy_finds_the_errors_of_a_wrong_program(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "right.py").write_text(RIGHT)
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", tmp_path]
    found = subprocess.run([*command, tmp_path / "wrong.py"], cwd=ROOT, capture_output=True, text=True, timeout=500)
    lines = {int(line) for line in re.findall(r"wrong\.py:(\d+): error", found.stdout)}
    assert lines == set(range(4, 9)), found.stdout
    found = subprocess.run([*command, tmp_path / "right.py"], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert "right.py" not in found.stdout, found.stdout
