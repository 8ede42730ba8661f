"""The command line: help, defaults, trainings end to end, and one clear line for invalid input, of the trainers too."""

import json
import re
import sys
from unittest import mock

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from sb3_ano import llm
from sb3_ano.llm import GANOConfig, GANOTrainer, LearnedReward, ShapedGRPOConfig, ShapedGRPOTrainer, ShapedPPOConfig
from sb3_ano.llm.cli import main
from tests.common import python
from tests.llm.tiny import CPU, chatty, classifier, critic_trainer, model, prompts, reward, tokenizer


def test_help_needs_no_trl_and_training_names_the_extra():
    code = "import sys; from sb3_ano.llm.cli import main; assert main(['--help']) == 0; assert 'trl' not in sys.modules\n"
    code += "sys.modules['trl'] = None; assert main(['train', '--help']) == 2"
    assert python("-c", code).stderr == "error: trl is not installed; install it with: pip install 'sb3-ano[llm]'\n"


def test_help_on_train_can_be_read(capsys, monkeypatch):
    """1,222 lines, with the options of this package at both ends and no choices."""
    monkeypatch.setenv("COLUMNS", "100")
    for algo, max_steps in (("ano", 62500), ("grpo", 15625)):
        assert main(["train", "--algo", algo, "--help"]) == 0
        shown = capsys.readouterr().out
        assert f"(default: {max_steps})" in shown
    assert len(shown.splitlines()) < 400
    for part in (r"--shaping .*\(default: ppo\)", r"same completions\. \(default: 1\)", "pythia-1b-deduped"):
        assert re.search(part, " ".join(shown.split())), part


def test_code_that_comes_with_models_may_run_if_that_is_asked_for(data, monkeypatch):
    """The option reached neither the tokenizer nor the reward model."""
    asked = []

    def load(*_, trust_remote_code=False, **__):
        asked.append(trust_remote_code)
        return tokenizer()

    monkeypatch.setattr("sb3_ano.llm.training.load_tokenizer", load)
    monkeypatch.setattr("sb3_ano.llm.rewards.load_tokenizer", load)
    command = ["train", "--dataset_name", "posts", "--model_name_or_path", "model", "--reward_model", "model"]
    assert main([*command, "--trust_remote_code", "True"]) == main(command) == 2  # it is no reward model
    assert asked == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_policies_are_trained_against_a_reward_model_and_a_function(data, capsys, monkeypatch):
    """Without an accelerator, no option has to say so."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (data / "rewards_here.py").write_text("from llm_task import gold")
    (data / "short.yaml").write_text("max_completion_length: 6\nnum_iterations: 2\ngradient_accumulation_steps: 2\n")
    prompts().select(range(8)).to_json("few.jsonl")

    def train(arguments: str, model: str = "model") -> None:
        common = "train --reward_model reward --reward_funcs rewards_here:gold --per_device_train_batch_size 8 "
        assert main([*common.split(), "--model_name_or_path", model, *arguments.split()]) == 0, capsys.readouterr().err

    weights, short = [], "--dataset_name posts --config short.yaml "
    for algo in ("gano", "grpo", "ano", "spo", "ppo"):
        train(f"{short} --algo {algo} --max_steps 3 --output_dir {algo}")
        config = torch.load(data / algo / "final" / "training_args.bin", weights_only=False)
        assert (config.num_iterations, config.use_cpu, config.bf16, config.fp16) == (2, True, False, False)
        assert any((data / algo / "runs").rglob("events.out.tfevents.*"))  # TensorBoard's
        card = (data / algo / "README.md").read_text()
        assert f"trained with {algo.upper()}" in card
        assert ("DeepSeekMath" in card) == (algo == "grpo")  # GANO was attributed to the paper of GRPO
        assert (data / algo / "critic" / "model.safetensors").is_file() == (algo in ("ano", "spo", "ppo"))
        final = AutoModelForCausalLM.from_pretrained(data / algo / "final")
        weights.append(torch.nn.utils.parameters_to_vector(final.parameters()))
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])
    # Options of TRL that had no effect.
    resume = "--resume_from_checkpoint gano/checkpoint-3 --save_steps 1 --save_total_limit 5"
    train(f"{short} --output_dir gano --max_steps 4 {resume}")
    assert {path.name for path in (data / "gano").glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}
    adapter = "use_peft: true\nlora_r: 2\n"
    (data / "epoch.yaml").write_text(f"num_train_epochs: 1\n{adapter}eval_strategy: epoch\ngradient_accumulation_steps: 4\n")
    train("--dataset_name few.jsonl --output_dir lora --config epoch.yaml --dataset_test_split train")
    assert (data / "lora/checkpoint-3").is_dir()  # one generation, used three times
    # Nothing could read the adapter.
    train(f"{short} --output_dir more --max_steps 2", model="lora/final")
    adapters = [(data / name / "final/adapter_model.safetensors").read_bytes() for name in ("lora", "more")]
    assert adapters[0] != adapters[1]


@pytest.mark.parametrize(
    ("given", "epochs", "steps"),
    [
        ("", 3.0, 15_625),
        ("--num_train_epochs 3", 3.0, -1),
        ("--config three.yaml", 3.0, -1),
        ("--num_train_epochs 2 --max_steps 15625", 2.0, 15_625),
        ("--max_steps 7", 3.0, 7),
    ],
)
def test_a_given_number_of_epochs_or_steps_decides(given, epochs, steps, data, monkeypatch):
    (data / "three.yaml").write_text("num_train_epochs: 3.0\n")
    made = mock.Mock()
    monkeypatch.setattr("sb3_ano.llm.training._make_trainer", made)
    monkeypatch.setattr("sb3_ano.llm.training.run", mock.Mock())
    assert main(f"{TRAIN} --output_dir new {given}".split()) == 0
    config = made.call_args.args[2]
    assert (config.num_train_epochs, config.max_steps) == (epochs, steps)


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


TRAIN = "train --dataset_name posts --reward_model reward --model_name_or_path model "
JUDGED = "compare up.jsonl six.jsonl --out out "
FILES = "compare --judge_function lengths:score --out out up.jsonl "
#: Command line after ``sb3-ano llm``, and what its error says.
COMMANDS = [
    ("train --reward_model reward", "give --dataset_name"),
    ("train --dataset_name posts", "nothing is rewarded; give --reward_model or --reward_funcs"),
    (TRAIN + "--epsilonn 0.3", "unknown option '--epsilonn'"),
    (TRAIN + "--config wrong.yaml", "unknown algorithm 'grop', did you mean 'grpo'?"),
    (TRAIN + "--shaping anno", "shaping='anno' is unknown; allowed are"),
    (TRAIN + "--epsilon -1", "epsilon=-1.0 is not allowed; allowed are positive finite numbers"),
    (TRAIN + "--num_iterations 0", "num_iterations=0 is not allowed; allowed are positive integers"),
    (TRAIN + "--importance_sampling_level word", "importance_sampling_level='word' is not allowed; allowed are 'token'"),
    (TRAIN + "--loss_type cispo", "loss_type='cispo' is not allowed with a shape; shaping='cispo'"),
    (TRAIN + "--delta 4", "delta=4.0 is not allowed with a shape, because it is a second clip"),
    (TRAIN + "--off_policy_mask_threshold 0.1", "off_policy_mask_threshold=0.1 is not allowed with a shape, because"),
    (TRAIN + "--use_bias_correction_kl True", "True is not allowed without shaping='ppo' and kl_in='loss'"),
    (TRAIN + "--algo grpo --shaping spo --use_bias_correction_kl True", "True is not allowed without shaping='ppo' and"),
    (TRAIN + "--mask_truncated_completions True", "True is not allowed with kl_in='reward', because TRL hides"),
    (TRAIN + "--multi_objective_aggregation normalize_then_sum", "'normalize_then_sum' is not allowed with a critic, kl_in="),
    (TRAIN + "--algo ppo --loss_type grpo", "loss_type='grpo' is not allowed with a critic; allowed are 'bnpo', 'dapo'"),
    (TRAIN + "--algo spo --scale_rewards batch", "scale_rewards='batch' is not allowed with a critic, which does not"),
    (TRAIN + "--algo ano --lam nan", "lam=nan is not allowed; allowed are numbers from 0 to 1"),
    (TRAIN + "--algo spo --shaping ano", "shaping='ano' is not allowed: SPOTrainer has the shape 'spo'"),
    (TRAIN + "--value_model reward", "value_model has no effect without a critic, which only ppo, spo and ano have"),
    (TRAIN + "--lora_alpha 4", "lora_alpha has no effect without LoRA; add --use_peft"),
    (TRAIN + "--dataset_test_split train", "dataset_test_split needs --eval_strategy"),
    (TRAIN + "--output_dir done --resume", "done has no checkpoint to resume from"),
    (TRAIN + "--max_steps 0", "max_steps=0 trains nothing"),
    (TRAIN + "--output_dir x --resume_from_checkpoint nowhere", "'nowhere' is no complete checkpoint"),
    (TRAIN + "--output_dir x --resume --resume_from_checkpoint nowhere", "resume and resume_from_checkpoint exclude each"),
    (TRAIN + "--output_dir old", "old holds a training; add --resume"),
    (TRAIN + "--dataset_train_split tarin", "data set 'posts' has no split 'tarin'; it has 'train', 'test'"),
    (TRAIN + "--dataset_name script.py", "data set 'script.py' cannot be read; allowed file names end in .json"),
    (TRAIN + "--model_name_or_path someone/nothing", "model 'someone/nothing' cannot be loaded"),
    (TRAIN + "--reward_funcs nowhere:it", "reward function 'nowhere:it' cannot be imported"),
    ("train --dataset_name posts --model_name_or_path model --algo ano --reward_funcs lengths:score", "give value_model"),
    # These asked the Hub for the model first.
    (TRAIN + "--model_name_or_path ./sft", "model_name_or_path='./sft' does not exist"),
    (TRAIN + "--model_name_or_path no/model --reward_model posts/reward", "reward_model='posts/reward' does not exist"),
    (FILES + "three.jsonl --request [1]", "argument --request: invalid json_object value: '[1]'"),
    (FILES + "up.jsonl", "'up.jsonl up.jsonl' are not allowed; give two or more, as NAME=PATH"),
    (FILES + "none.jsonl", "none='none.jsonl' does not exist"),
    (FILES + "model", "'model' is no JSON, CSV or Parquet file, but a model that needs prompts; give --dataset_name"),
    (FILES + "bad.jsonl", "data set 'bad.jsonl' cannot be read: JSON parse error: Missing a closing quotation mark"),
    (FILES + "twice.jsonl", "twice.jsonl repeats a prompt; allowed is one completion per prompt"),
    (FILES + "empty.jsonl", "data set 'empty.jsonl' cannot be read: it is empty"),
    (FILES + "other.jsonl", "there is no prompt that all files have, and the data set, if one is given"),
    (FILES + "six.jsonl --temperatures -1", "temperatures=-1.0 is not allowed; allowed are finite numbers from 0"),
    (JUDGED + "--judge_model m --base_url http://x --template up.jsonl", "'up.jsonl' lacks {prompt}, {first}, {second}"),
    (JUDGED + "--judge_model m --base_url http://127.0.0.1:9/v1 --retries 1", "judge 'm' failed: Connection error."),
]
SCRIPT = """
import json, os, tempfile
from sb3_ano.cli import main

outcomes = []
for arguments in json.load(open("commands.json")):
    with tempfile.TemporaryFile() as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        status = main(["llm", *arguments.split()])
        os.dup2(stderr, 2)
        file.seek(0)
        outcomes.append((status, file.read().decode()))
json.dump(outcomes, open("outcomes.json", "w"))
"""


def test_commands_end_with_one_line(data):
    """All of them in one new process, because importing TRL takes seconds; everything that reaches standard error counts."""
    rows = [json.dumps({"prompt": prompt, "completion": completion}) + "\n" for prompt, completion in ("ac", "ad", "bc")]
    files = {"up.jsonl": rows[0], "six.jsonl": rows[1], "other.jsonl": rows[2], "twice.jsonl": rows[0] + rows[1]}
    files |= {"bad.jsonl": rows[0] + '{"prompt": "', "empty.jsonl": ""}
    files |= {"lengths.py": "def score(completions, **_):\n    return [len(text) for text in completions]\n"}
    files |= {"wrong.yaml": "algo: grop\n", "old/checkpoint-1/x": "", "done/final/x": ""}
    files |= {"script.py": SCRIPT, "commands.json": json.dumps([arguments for arguments, _ in COMMANDS])}
    for name, text in files.items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text(text)
    before = {*data.iterdir()}
    python("script.py", check=True)
    assert {path.name for path in {*data.iterdir()} - before} <= {"outcomes.json", "__pycache__", "out"}  # no training
    outcomes = json.loads((data / "outcomes.json").read_text())
    for (arguments, message), (status, errors) in zip(COMMANDS, outcomes, strict=True):
        assert status == 2, arguments
        assert re.fullmatch(f"error: .*{re.escape(message)}.*\n", errors), f"{arguments}: {errors}"


def kl(completion_ids, **_):
    return reward(completion_ids)


WITHOUT_EOS = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer, pad_token="<|padding|>")


@pytest.mark.parametrize(
    ("trainer", "config", "given", "message"),
    [
        (ShapedGRPOTrainer, GRPOConfig, {}, "args is a GRPOConfig; allowed are settings of class ShapedGRPOConfig"),
        (GANOTrainer, ShapedGRPOConfig, {}, "allowed are settings of class GANOConfig"),
        (ShapedGRPOTrainer, ShapedPPOConfig, {}, "ShapedPPOConfig; allowed are settings of class ShapedGRPOConfig"),
        (ShapedGRPOTrainer, ShapedGRPOConfig, {"shaping": lambda x: x + 1}, r"violates anchoring: h\(0\) = 1"),
        (GANOTrainer, GANOConfig, {"reward_funcs": [reward, kl]}, "a reward function is called 'kl', like one of"),
        (GANOTrainer, GANOConfig, {"train_dataset": {"text": ["a"]}}, "train_dataset has no column 'prompt'; it has text"),
        (GANOTrainer, GANOConfig, {"train_dataset": {"prompt": ["a", "  "]}}, "train_dataset has the prompt '  ' in row 1"),
        (GANOTrainer, GANOConfig, {"train_dataset": {"prompt": [[]]}}, r"train_dataset has the prompt \[\] in row 0"),
        (GANOTrainer, GANOConfig, {"train_dataset": {"prompt": []}}, "train_dataset has no rows"),
        (GANOTrainer, GANOConfig, {"processing_class": WITHOUT_EOS}, "has no eos_token, without which no completion ends"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_the_trainers_do_not_take_is_rejected(trainer, config, given, message, tmp_path):
    given = {"reward_funcs": reward, "train_dataset": prompts(), "processing_class": tokenizer(), **given}
    if isinstance(given["train_dataset"], dict):
        given["train_dataset"] = Dataset.from_dict(given["train_dataset"])
    with pytest.raises((TypeError, ValueError), match=message):
        trainer(model(tmp_path), args=config(str(tmp_path), **CPU), **given)


def test_a_critic_rejects_sharded_models_and_images_and_a_reward_model_zero_3(tmp_path, monkeypatch):
    start = llm.ANOTrainer.create_accelerator_and_postprocess
    for name, message in (("is_fsdp_enabled", "is not allowed with DeepSpeed or FSDP"), ("_is_vlm", "reads text only")):

        def start_and_say_so(self, name=name):
            start(self)
            setattr(self, name, True)

        monkeypatch.setattr(llm.ANOTrainer, "create_accelerator_and_postprocess", start_and_say_so)
        with pytest.raises(ValueError, match=f"a critic {message}"):
            critic_trainer(tmp_path, beta=0.0)
    monkeypatch.setattr("sb3_ano.llm.rewards.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="reward_model is not allowed with DeepSpeed ZeRO-3"):
        LearnedReward.load(classifier(tmp_path), tokenizer(), "cpu")


def test_reward_models_need_a_score_and_the_tokenizer_of_the_policy(tmp_path):
    model(tmp_path)
    with pytest.raises(ValueError, match="model' is not a reward model: it lacks score.weight"):
        LearnedReward.load(str(tmp_path / "model"), tokenizer(), "cpu")
    other = chatty()
    other.add_tokens(["another"])
    other.save_pretrained(classifier(tmp_path))
    with pytest.raises(ValueError, match="has another tokenizer .* than the policy"):
        LearnedReward.load(classifier(tmp_path), tokenizer(), "cpu")
