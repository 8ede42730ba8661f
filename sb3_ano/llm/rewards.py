"""A reward model as a reward function."""

from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from sb3_ano.llm.data import load_tokenizer


class LearnedReward:
    """Score completions with a reward model, from the tokens that the policy produced.

    TRL decodes completions without their EOS token before a reward model sees them, but its ``RewardTrainer`` trains on
    texts that end with EOS. A model that reads its score at the last token is then evaluated at a token that it was never
    trained on. Here the model sees the same tokens as the policy wrote, with EOS if the completion ended. (If EOS is also
    the padding token, transformers' classifiers skip it, and the score is that of the text without its end.)

    :param model: sequence classifier with one label
    :param tokenizer: tokenizer of the model, which is also the policy's
    :param missing_eos_penalty: amount subtracted from the score of a completion without EOS
    """

    def __init__(self, model: Any, tokenizer: Any, missing_eos_penalty: float = 0.0) -> None:
        self.__name__ = "reward_model"  # TRL logs the reward under this name
        self.model = model.eval()
        self.model.config.pad_token_id = tokenizer.pad_token_id
        self.tokenizer = tokenizer
        self.missing_eos_penalty = missing_eos_penalty

    @classmethod
    def load(cls, name: str, tokenizer: Any, device: torch.device | str, missing_eos_penalty: float = 0.0) -> "LearnedReward":
        """Load a reward model.

        :param name: Hub id or directory
        :param tokenizer: tokenizer of the policy
        :param device: device of the model
        :param missing_eos_penalty: see the class
        :raises ValueError: if it cannot be loaded, lacks a score, or has another tokenizer than the policy
        """
        own = load_tokenizer(name)
        if tokenizer.get_vocab() != own.get_vocab():
            raise ValueError(
                f"reward_model={name!r} has another tokenizer ({len(own)} tokens) than the policy ({len(tokenizer)} tokens); "
                "allowed are reward models that were trained with the same tokenizer"
            )
        model, report = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, output_loading_info=True)
        if missing := sorted(report["missing_keys"]):
            raise ValueError(f"reward_model={name!r} is not a reward model: it lacks {', '.join(missing)}")
        return cls(model.to(device), own, missing_eos_penalty)

    @torch.inference_mode()
    def __call__(self, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Return one score per completion."""
        prompt_ids = self.tokenizer(text=prompts)["input_ids"]
        rows = [[*prompt, *completion] for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
        batch = self.tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt").to(self.model.device)
        scores = self.model(**batch).logits[:, 0].float().tolist()
        ended = [self.tokenizer.eos_token_id in ids for ids in completion_ids]
        return [score - (0.0 if end else self.missing_eos_penalty) for score, end in zip(scores, ended, strict=True)]
