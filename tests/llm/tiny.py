"""A GPT-NeoX of a few thousand parameters, and trainers of it."""

import functools
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from sb3_ano.llm import task

#: Settings under which an update takes a moment; each generation serves three updates of two forward passes.
SMALL = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "num_iterations": 3,
    "max_completion_length": 8,
    "learning_rate": 1e-3,
    "beta": 0.0,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": "none",
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_bias_correction_kl": False,
    "seed": 1,
}


@functools.cache
def tokenizer():
    return task.make_tokenizer()


@functools.cache
def prompts():
    return task.make_posts(64, seed=0)


def model(folder, noise=0.0):
    """A model that is far from uniform, so that completions and ratios differ; its reference model is without the noise."""
    path = Path(folder, "model")
    if not path.exists():
        torch.manual_seed(0)
        made = task.make_model(tokenizer(), hidden_size=16, layers=1)
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


def make(folder, trainer=GRPOTrainer, config=GRPOConfig, noise=0.0, shaping=None, **settings):
    args = config(str(folder), **{**SMALL, **settings})
    named = {} if shaping is None else {"shaping": shaping}
    return trainer(model(folder, noise), reward, args, prompts(), None, tokenizer(), **named)


def parameters(trainer) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
