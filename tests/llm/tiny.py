"""A GPT-NeoX of a few thousand parameters, and trainers of it."""

import copy
import functools
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import GRPOConfig, GRPOTrainer

from sb3_ano.llm import ANOTrainer, ShapedPPOConfig
from tests.common import ROOT

EXAMPLES = ROOT / "examples" / "llm"
sys.path.append(str(EXAMPLES))
import llm_task  # noqa: E402

CPU = {"bf16": False, "use_cpu": True}
#: Settings with fast updates; each generation serves three updates of two forward passes.
SMALL = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4, "num_iterations": 3, **CPU}
SMALL |= {"max_completion_length": 8, "learning_rate": 1e-3, "beta": 0.0, "gradient_checkpointing": False, "logging_steps": 1}
SMALL |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_bias_correction_kl": False, "seed": 1}


@functools.cache
def tokenizer():
    return llm_task.make_tokenizer()


def chatty(template="{% for message in messages %}{{ message['content'] }}{% endfor %}"):
    """A copy of the tokenizer with a chat template."""
    made = copy.deepcopy(tokenizer())
    made.chat_template = template
    return made


@functools.cache
def prompts():
    return llm_task.make_posts(64, seed=0)


def model(folder, noise=0.0):
    """A model that is far from uniform, so that completions and ratios differ; its reference model is without the noise."""
    path = Path(folder, "model")
    if not path.exists():
        torch.manual_seed(0)
        made = llm_task.make_model(tokenizer(), hidden_size=16, layers=1)
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(6.0)
        made.save_pretrained(path)
        tokenizer().save_pretrained(path)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return loaded


def reward(completion_ids, **_):
    """Anything that tells completions apart."""
    return [sum((7 * token) % 11 for token in ids) / 10 for ids in completion_ids]


def sometimes(completion_ids, **_):
    """No score for one completion of four."""
    return [None if index % 4 == 1 else 1.0 + index for index in range(len(completion_ids))]


def make(folder, trainer=GRPOTrainer, config=GRPOConfig, noise=0.0, reward=reward, data=None, named=(), **settings):
    """A trainer; ``named`` are its keyword arguments, ``settings`` those of its configuration."""
    args = config(**{"output_dir": str(folder), **SMALL, **settings})
    evaluated = prompts().select(range(8)) if "eval_strategy" in settings else None
    return trainer(model(folder, noise), reward, args, data or prompts(), evaluated, tokenizer(), **dict(named))


def parameters(trainer) -> torch.Tensor:
    """Those of the policy and, if there is one, of the critic."""
    models = [trainer.model, *([trainer.critic] if hasattr(trainer, "critic") else [])]
    return torch.cat([parameter.detach().flatten() for part in models for parameter in part.parameters()])


def rollout(trainer) -> dict:
    """A batch as TRL makes it."""
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    return trainer._generate_and_score_completions(batch)


def loss(trainer, inputs) -> torch.Tensor:
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    return trainer._compute_loss(trainer.model, inputs)


def scores_of(inputs) -> torch.Tensor:
    """Scores of the completions by :func:`reward`."""
    rows = zip(inputs["completion_ids"], inputs["completion_mask"], strict=True)
    return torch.tensor(reward([ids[mask.bool()].tolist() for ids, mask in rows]))


def log_probabilities(policy, inputs) -> torch.Tensor:
    """Those of the completions, from the model's own forward pass."""
    mask = inputs["completion_mask"]
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], mask], dim=1)
    logits = policy(input_ids=ids, attention_mask=attention).logits[:, -mask.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)


#: Settings with a critic; each generation serves three updates of two forward passes, of prompts that are all different.
SMALL_CRITIC = {**SMALL, "num_generations": 1, "beta": 0.05, "lr_scheduler_type": "linear", "temperature": 1.0}


def classifier(folder) -> str:
    """Make a reward model from the model, with its tokenizer; return its directory."""
    path = Path(folder, "reward")
    if not path.exists():
        model(folder)
        torch.manual_seed(1)
        made = AutoModelForSequenceClassification.from_pretrained(Path(folder, "model"), num_labels=1, dtype=torch.float32)
        with torch.no_grad():
            made.score.weight.mul_(20.0)
        made.save_pretrained(path)
        tokenizer().save_pretrained(path)
    return str(path)


def critic_trainer(folder, trainer=ANOTrainer, noise=0.0, reward=reward, named=(), **settings):
    """A trainer with a critic; ``value_model`` is one of its keyword arguments."""
    named = {"value_model": settings.pop("value_model", classifier(folder)), **dict(named)}
    return make(folder, trainer, ShapedPPOConfig, noise, reward, named=named, **{**SMALL_CRITIC, **settings})
