"""The loss of PPO with a critic against the last release of TRL that had a trainer for it."""

import json

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification

from sb3_ano.llm import PPOTrainer, ShapedPPOConfig
from tests.common import python
from tests.llm.tiny import SMALL_CRITIC, classifier, model, prompts, tokenizer

SETTINGS = {"learning_rate": 0.2, "temperature": 1.0, "gamma": 0.98, "lam": 0.9, "vf_coef": 0.5, "cliprange_value": 0.1}

# Completions have the full length, because that trainer has one more step after the end of shorter ones.
SCRIPT = """
import copy, json, sys
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

given = torch.load(sys.argv[1])
completions, load = given["completions"], {"dtype": torch.float64}
policy = AutoModelForCausalLM.from_pretrained(given["model"], **load)
reward, value = (AutoModelForSequenceClassification.from_pretrained(given["reward"], num_labels=1, **load) for _ in range(2))
tokenizer = AutoTokenizer.from_pretrained(given["model"], padding_side="left")
settings = given["settings"] | {"temperature": given["settings"]["temperature"] - 1e-7}  # it adds this amount
args = PPOConfig(
    output_dir=given["out"], per_device_train_batch_size=len(completions), gradient_accumulation_steps=1, kl_coef=0.5,
    total_episodes=len(completions), num_ppo_epochs=4, response_length=completions.shape[1], missing_eos_penalty=1.0,
    num_sample_generations=0, bf16=False, use_cpu=True, report_to="none", save_strategy="no", optim="sgd",
    lr_scheduler_type="constant", gradient_checkpointing=False, **settings,
)
data = Dataset.from_dict({"input_ids": given["prompts"]})
with torch.no_grad():  # a reference that differs from the policy
    reference = copy.deepcopy(policy)
    for parameter, move in zip(policy.parameters(), given["moves"], strict=True):
        parameter += move
trainer = PPOTrainer(args, tokenizer, policy, reference, reward, data, value, eval_dataset=data)

def generate(model, queries, *_):
    rows = [given["prompts"].index(query) for query in queries.tolist()]
    ids = torch.cat([queries, completions[rows]], dim=1)
    return ids, model(ids).logits[:, queries.shape[1] - 1 : -1]

losses, backward = [], trainer.accelerator.backward
trainer.accelerator.backward = lambda loss, **options: (losses.append(loss.item()), backward(loss, **options))
ppo_trainer.batch_generation = generate
trainer.train()
print("losses:", json.dumps(losses))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You are using .rollout_func.:UserWarning")
def test_the_total_loss_is_that_of_trl_1_12(tmp_path):
    """Four updates with the same completions, in float64; from the second one, ratios and values are clipped."""
    installed = tmp_path / "trl"
    command = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", installed, "trl==1.12"]
    if (done := python(*command)).returncode != 0:
        pytest.skip(f"TRL 1.12 cannot be installed: {done.stderr[-200:]}")
    # Without padding, because rotary embeddings are computed in float32.
    tokens = {text: tokenizer()(text)["input_ids"] for text in prompts()["prompt"]}
    texts = [text for text in tokens if len(tokens[text]) == len(tokens[prompts()["prompt"][0]])][:8]
    ids = [tokens[text] for text in texts]
    completions = torch.randint(3, 30, (len(ids), 6), generator=torch.Generator().manual_seed(0))
    completions[::2, -1] = tokenizer().eos_token_id  # the others are fined; an earlier EOS is no end here, unlike in TRL 1.12
    policy, reference = model(tmp_path, noise=0.03).double(), model(tmp_path).double()
    moves = [a.detach() - b.detach() for a, b in zip(policy.parameters(), reference.parameters(), strict=True)]
    given = {"model": str(tmp_path / "model"), "reward": classifier(tmp_path), "out": str(tmp_path / "theirs")}
    given |= {"prompts": ids, "completions": completions, "settings": SETTINGS, "moves": moves}
    torch.save(given, tmp_path / "given.pt")
    (tmp_path / "script.py").write_text(f"import sys; sys.path.insert(0, {str(installed)!r})\n{SCRIPT}")
    done = python(tmp_path / "script.py", tmp_path / "given.pt")
    assert done.returncode == 0, done.stderr[-3000:]
    (expected,) = (json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("losses:"))

    scorer = AutoModelForSequenceClassification.from_pretrained(classifier(tmp_path), dtype=torch.float64)
    losses: list[float] = []

    def generate(texts, trainer):
        rows = [given["prompts"].index(row) for row in tokenizer()(text=texts)["input_ids"]]
        return {"prompt_ids": [ids[row] for row in rows], "completion_ids": completions[rows].tolist(), "logprobs": None}

    @torch.no_grad()
    def score(prompts, completion_ids, **_):
        rows = zip(tokenizer()(text=prompts)["input_ids"], completion_ids, strict=True)
        return [scorer(torch.tensor([prompt + completion])).logits.item() for prompt, completion in rows]

    class Recorder(PPOTrainer):
        def _compute_loss(self, *arguments):
            losses.append((loss := super()._compute_loss(*arguments)).item())
            return loss

    batch = {"per_device_train_batch_size": len(ids), "gradient_accumulation_steps": 1, "max_completion_length": 6}
    updates = {"num_iterations": 4, "max_steps": 4, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    args = ShapedPPOConfig(
        str(tmp_path), **{**SMALL_CRITIC, **SETTINGS, **batch, **updates, "beta": 0.5, "missing_eos_penalty": 1.0}
    )
    value_model = AutoModelForSequenceClassification.from_pretrained(classifier(tmp_path), dtype=torch.float64)
    data = Dataset.from_dict({"prompt": texts})
    trainer = Recorder(policy, score, args, data, None, tokenizer(), value_model=value_model, rollout_func=generate)
    trainer.train()
    assert losses == pytest.approx(expected, rel=1e-6)
    assert len(losses) == 4
    for name in ("ratio/outside_high", "critic/clip_ratio"):
        assert 0.05 < max(entry.get(name, 0.0) for entry in trainer.state.log_history) < 0.95, name
