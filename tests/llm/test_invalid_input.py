"""Invalid input of ``train``, ``compare`` and the trainers: one clear line each."""

import json
import subprocess
import sys

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig

from sb3_ano.llm import (
    ANOTrainer,
    GANOConfig,
    GANOTrainer,
    LearnedReward,
    ShapedGRPOConfig,
    ShapedGRPOTrainer,
    ShapedPPOConfig,
)
from tests.llm.tiny import CPU, chatty, classifier, critic_trainer, environment, model, prompts, reward, tokenizer

TRAIN = "train --dataset_name posts --reward_model reward --model_name_or_path model "
JUDGED = "compare up.jsonl six.jsonl --out out "
FILES = "compare --judge_function lengths:score --out out up.jsonl "
#: Command line after ``sb3-ano llm``, and what its error says.
COMMANDS = [
    ("trian", "unknown command 'trian', did you mean 'train'?"),
    ("train --algo dpo", "argument --algo: invalid choice: 'dpo' (choose from 'ppo', 'spo', 'ano', 'grpo', 'gano')"),
    ("train --reward_model reward", "give --dataset_name"),
    ("train --dataset_name posts", "nothing is rewarded; give --reward_model or --reward_funcs"),
    (TRAIN + "--epsilonn 0.3", "unknown option '--epsilonn'"),
    (TRAIN + "--config nowhere.yaml", "No such file or directory: 'nowhere.yaml'"),
    (TRAIN + "--config wrong.yaml", "unknown algorithm 'grop', did you mean 'grpo'?"),
    (TRAIN + "--shaping anno", "shaping='anno' is unknown; allowed are"),
    (TRAIN + "--epsilon -1", "epsilon=-1.0 is not allowed; allowed are positive finite numbers"),
    (TRAIN + "--missing_eos_penalty inf", "missing_eos_penalty=inf is not allowed; allowed are finite numbers from 0"),
    (TRAIN + "--num_iterations 0", "num_iterations=0 is not allowed; allowed are positive integers"),  # review B17
    (TRAIN + "--importance_sampling_level word", "importance_sampling_level='word' is not allowed; allowed are 'token'"),
    (TRAIN + "--loss_type cispo", "loss_type='cispo' is not allowed with a shape; allowed are 'grpo', 'bnpo'"),
    (TRAIN + "--delta 4", "delta=4.0 is not allowed with a shape, because it is a second clip of the ratio; allowed are None"),
    (TRAIN + "--off_policy_mask_threshold 0.1", "off_policy_mask_threshold=0.1 is not allowed with a shape, because"),
    (TRAIN + "--use_bias_correction_kl True", "True is not allowed without shaping='ppo' and kl_in='loss'"),
    (TRAIN + "--algo grpo --shaping spo --use_bias_correction_kl True", "True is not allowed without shaping='ppo' and"),
    (TRAIN + "--mask_truncated_completions True", "True is not allowed with kl_in='reward', because TRL hides"),  # review B13
    (TRAIN + "--multi_objective_aggregation normalize_then_sum", "'normalize_then_sum' is not allowed with a critic, kl_in="),
    (TRAIN + "--algo ppo --loss_type grpo", "loss_type='grpo' is not allowed with a critic; allowed are 'bnpo', 'dapo'"),
    (TRAIN + "--algo spo --scale_rewards batch", "scale_rewards='batch' is not allowed with a critic, which does not"),
    (TRAIN + "--algo ano --lam nan", "lam=nan is not allowed; allowed are numbers from 0 to 1"),
    (TRAIN + "--algo ano --vf_coef -1", "vf_coef=-1.0 is not allowed; allowed are finite numbers from 0"),
    (TRAIN + "--algo spo --shaping ano", "shaping='ano' is not allowed: SPOTrainer has the shape 'spo'"),
    (TRAIN + "--value_model reward", "value_model has no effect without a critic, which only ppo, spo and ano have"),
    (TRAIN + "--lora_alpha 4", "lora_alpha has no effect without LoRA; add --use_peft"),  # review N3
    (TRAIN + "--dataset_test_split train", "dataset_test_split needs --eval_strategy"),  # N5
    (TRAIN + "--output_dir done --resume", "done has no checkpoint to resume from"),  # N6
    (TRAIN + "--max_steps 0", "max_steps=0 trains nothing"),  # N9
    (TRAIN + "--output_dir x --resume_from_checkpoint nowhere", "'nowhere' is no complete checkpoint"),  # N1
    (TRAIN + "--output_dir old", "old holds a training; add --resume"),
    (TRAIN + "--dataset_train_split tarin", "data set 'posts' has no split 'tarin'; it has 'train', 'test'"),
    (TRAIN + "--dataset_name script.py", "data set 'script.py' cannot be read; allowed file names end in .json"),
    (TRAIN + "--model_name_or_path someone/nothing", "model 'someone/nothing' cannot be loaded"),
    (TRAIN + "--report_to wandb", "requires wandb to be installed"),  # review B17
    (TRAIN + "--reward_funcs nowhere:it", "reward function 'nowhere:it' cannot be imported"),
    (TRAIN + "--reward_funcs it", "reward function 'it' cannot be imported"),
    ("train --dataset_name posts --model_name_or_path model --algo ano --reward_funcs lengths:score", "give value_model"),
    # Users Z13: these asked the Hub for the model first.
    (TRAIN + "--model_name_or_path no/model --dataset_name no.json", "dataset_name='no.json' does not exist"),
    (TRAIN + "--model_name_or_path ./sft", "model_name_or_path='./sft' does not exist"),
    (TRAIN + "--model_name_or_path no/model --reward_model posts/reward", "reward_model='posts/reward' does not exist"),
    ("compare --judge_function lengths:score --out out up.jsonl", "'up.jsonl' are not allowed; give two or more"),
    (FILES + "up.jsonl", "'up.jsonl up.jsonl' are not allowed; give two or more, each with its own name"),
    (FILES + "none.jsonl", "none='none.jsonl' does not exist"),
    (FILES + "model", "'model' is no JSON, CSV or Parquet file, but a model that needs prompts; give --dataset_name"),
    (FILES + "bad.jsonl", "data set 'bad.jsonl' cannot be read: JSON parse error: Missing a closing quotation mark"),
    (FILES + "lacking.jsonl", "data set 'lacking.jsonl', split 'train', has no column 'completion'; it has prompt"),
    (FILES + "twice.jsonl", "twice.jsonl repeats a prompt; allowed is one completion per prompt"),
    (FILES + "empty.jsonl", "data set 'empty.jsonl' cannot be read: it is empty"),
    (FILES + "other.jsonl", "up and other have no prompt in common"),
    (FILES + "six.jsonl --temperatures -1", "temperatures=-1.0 is not allowed; allowed are finite numbers from 0"),
    (FILES + "six.jsonl --samples 0", "samples=0 is not allowed; allowed are positive integers"),
    (FILES + "six.jsonl --sample 3", "unrecognized arguments: --sample 3"),
    (JUDGED, "one of the arguments --judge_model --reward_model --judge_function is required"),
    (JUDGED + "--judge_model m", "set the `OPENAI_API_KEY`"),
    (JUDGED + "--judge_model m --base_url http://x --template none.txt", "No such file or directory: 'none.txt'"),
    (JUDGED + "--judge_model m --base_url http://x --template up.jsonl", "'up.jsonl' lacks {prompt}, {first}, {second}"),
    (JUDGED + "--judge_model m --base_url http://127.0.0.1:9/v1 --retries 1", "judge 'm' failed: Connection error."),
    (JUDGED + "--reward_model nowhere/nothing", "model 'nowhere/nothing' cannot be loaded"),
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


def test_commands_end_with_one_line(tmp_path):
    """All of them in one new process, because importing TRL takes seconds; everything that reaches standard error counts."""
    classifier(tmp_path)
    for name, count in (("train", 64), ("test", 8)):
        prompts().select(range(count)).to_json(tmp_path / f"posts/{name}.jsonl")
    rows = [json.dumps({"prompt": prompt, "completion": completion}) + "\n" for prompt, completion in ("ac", "ad", "bc")]
    files = {"up.jsonl": rows[0], "six.jsonl": rows[1], "other.jsonl": rows[2], "twice.jsonl": rows[0] + rows[1]}
    files |= {"bad.jsonl": rows[0] + '{"prompt": "', "lacking.jsonl": '{"prompt": "p"}\n', "empty.jsonl": ""}
    files |= {"lengths.py": "def score(completions, **_):\n    return [len(text) for text in completions]\n"}
    files |= {"wrong.yaml": "algo: grop\n", "old/checkpoint-1/x": "", "done/final/x": ""}
    files |= {"script.py": SCRIPT, "commands.json": json.dumps([arguments for arguments, _ in COMMANDS])}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = {*tmp_path.iterdir()}
    variables = {name: value for name, value in environment().items() if name != "OPENAI_API_KEY"}
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=variables, check=True, timeout=500)
    assert {path.name for path in {*tmp_path.iterdir()} - before} <= {"outcomes.json", "__pycache__", "out"}  # no training
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    wrong = []
    for (arguments, message), (status, errors) in zip(COMMANDS, outcomes, strict=True):
        (line, *others) = errors.splitlines() or [""]
        if status != 2 or others or not line.startswith("error: ") or message not in line:
            wrong.append((arguments, message, status, errors))
    assert not wrong


def kl(completion_ids, **_):
    return reward(completion_ids)


WITHOUT_EOS = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer, pad_token="<|padding|>")


@pytest.mark.parametrize(
    ("trainer", "config", "given", "message"),
    [
        (ShapedGRPOTrainer, GRPOConfig, {}, "args is a GRPOConfig; allowed are settings of class ShapedGRPOConfig"),
        (GANOTrainer, ShapedGRPOConfig, {}, "allowed are settings of class GANOConfig"),  # review B14
        (ShapedGRPOTrainer, ShapedPPOConfig, {}, "args is a ShapedPPOConfig; allowed are settings of class ShapedGRPOConfig"),
        (ShapedGRPOTrainer, ShapedGRPOConfig, {"shaping": lambda x: x + 1}, r"violates anchoring: h\(0\) = 1"),  # review N8
        (GANOTrainer, GANOConfig, {"reward_funcs": [reward, kl]}, "a reward function is called 'kl', like one of"),  # B15
        (GANOTrainer, GANOConfig, {"train_dataset": {"text": ["a"]}}, "train_dataset has no column 'prompt'; it has text"),
        (GANOTrainer, GANOConfig, {"train_dataset": {"prompt": ["a", "  "]}}, "train_dataset has an empty prompt in row 1"),
        (GANOTrainer, GANOConfig, {"train_dataset": {"prompt": [[]]}}, "train_dataset has an empty prompt in row 0"),
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
    class Sharded(ANOTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.is_fsdp_enabled = True

    class Seeing(ANOTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self._is_vlm = True

    for kind, message in ((Sharded, "is not allowed with DeepSpeed or FSDP"), (Seeing, "reads text only")):
        with pytest.raises(ValueError, match=f"a critic {message}"):
            critic_trainer(tmp_path, kind, beta=0.0)
    monkeypatch.setattr("sb3_ano.llm.rewards.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="reward_model is not allowed with DeepSpeed ZeRO-3"):  # review B16
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
