"""A reward model as a reward function."""

from typing import Any

import torch

from sb3_ano.extras import missing_extra
from sb3_ano.llm.data import check_model, check_same_tokenizer, load_tokenizer

try:
    from transformers import AutoModelForSequenceClassification
except ImportError as error:
    raise missing_extra("llm", error.name or "transformers") from error


class LearnedReward:
    """The scores of a reward model, for prompts and completions as the tokens that the policy produced.

    TRL decodes completions without their end-of-sequence token before a reward model sees them, while its ``RewardTrainer``
    trains on texts that end with it. A model that reads its score at the last token is then asked about a token that it was
    never trained on. Here it sees what the policy wrote, and whether it ended.

    :param model: sequence classifier with one label
    :param tokenizer: its tokenizer, which is the policy's too
    :param missing_eos_penalty: what a completion that did not end loses; the same unit as the score
    """

    def __init__(self, model: Any, tokenizer: Any, missing_eos_penalty: float = 0.0) -> None:
        self.__name__ = "reward_model"  # as which TRL reports it
        self.model = model.eval()
        self.model.config.pad_token_id = tokenizer.pad_token_id
        self.tokenizer = tokenizer
        self.missing_eos_penalty = missing_eos_penalty

    @classmethod
    def load(cls, name: str, tokenizer: Any, device: torch.device | str, missing_eos_penalty: float = 0.0) -> "LearnedReward":
        """Load a reward model.

        :param name: Hub id or folder
        :param tokenizer: the policy's
        :param device: where it computes
        :param missing_eos_penalty: see the class
        :raises ValueError: if it cannot be had, is no classifier with one label, or has another tokenizer than the policy
        """
        check_model(name, "reward_model")
        own = load_tokenizer(name)
        check_same_tokenizer(tokenizer, own, name)
        model, report = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, output_loading_info=True)
        if report["missing_keys"]:
            raise ValueError(f"reward_model={name!r} is no reward model: it lacks {', '.join(sorted(report['missing_keys']))}")
        return cls(model.to(device), own, missing_eos_penalty)

    @torch.inference_mode()
    def __call__(self, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Scores, one for each completion."""
        prompt_ids = self.tokenizer(text=prompts)["input_ids"]
        rows = [[*prompt, *completion] for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
        batch = self.tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt").to(self.model.device)
        scores = self.model(**batch).logits[:, 0].float().tolist()
        ended = [self.tokenizer.eos_token_id in ids for ids in completion_ids]
        return [score - (0.0 if end else self.missing_eos_penalty) for score, end in zip(scores, ended, strict=True)]
