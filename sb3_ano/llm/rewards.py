"""Reward models: as reward functions, and as the start of a critic."""

import asyncio
import contextlib
import functools
import inspect
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import find_adapter_config_file

from sb3_ano.llm.data import Prompt, load_tokenizer, tokenize_prompts
from sb3_ano.llm.smollm import model_path

_ALLOWED = "allowed is a list with a number per completion, or None for one without a score"


class LearnedReward:
    """Score completions with a reward model, from the tokens that the policy produced.

    TRL decodes completions without their EOS token before a reward model sees them, but its ``RewardTrainer`` trains on
    texts that end with EOS. A model that reads its score at the last token is then evaluated at a token that it was never
    trained on. Here the model sees the same tokens as the policy wrote, with EOS if the completion ended. (If EOS is also
    the padding token, transformers' classifiers skip it, and the score is that of the text without its end.)

    :param model: sequence classifier with one label
    :param tokenizer: tokenizer of the model; it has the policy's vocabulary and, for prompts of messages, its chat template
    :param chat_template_kwargs: arguments of the chat template, as in the settings of the policy's training
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: dict[str, object] | None = None,
    ) -> None:
        # TRL logs the reward under this name.
        self.__name__ = "reward_model"
        self.model = model.eval()
        # A classifier finds the last token of a row before its padding.
        self.model.config.pad_token_id = tokenizer.pad_token_id
        self.tokenizer = tokenizer
        self.chat_template_kwargs = chat_template_kwargs or {}

    @classmethod
    def load(
        cls,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device | str,
        trust_remote_code: bool = False,
        chat_template_kwargs: dict[str, object] | None = None,
    ) -> "LearnedReward":
        """Load a reward model.

        :param name: Hub id or directory of a model or of a LoRA adapter
        :param tokenizer: tokenizer of the policy
        :param device: device of the model
        :param trust_remote_code: whether code that comes with the model may run
        :param chat_template_kwargs: arguments of the chat template
        :raises ValueError: if it cannot be loaded, lacks a score, or has another tokenizer than the policy
        """
        if is_deepspeed_zero3_enabled():
            raise ValueError("reward_model is not allowed with DeepSpeed ZeRO-3, which would load a part of it; use ZeRO-2")

        model, own_tokenizer, missing = load_classifier(name, tokenizer, "reward_model", trust_remote_code)
        if missing:
            raise ValueError(f"reward_model={name!r} is not a reward model: it lacks {', '.join(missing)}")

        # Prompts must be the same tokens for the reward model as for the policy.
        own_tokenizer.chat_template = tokenizer.chat_template
        return cls(model.to(device), own_tokenizer, chat_template_kwargs)

    @torch.inference_mode()
    def __call__(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Prompt] | None = None,
        completion_ids: list[list[int]] | None = None,
        **_: object,
    ) -> list[float]:
        """Return one score per completion.

        :param prompts: texts or conversations
        :param completions: texts or conversations of one message, read if there are no tokens; they end with EOS
        :param completion_ids: tokens of the completions
        """
        if completion_ids is None:
            completion_ids = self._tokenize(completions or [])

        prompt_ids = tokenize_prompts(prompts, self.tokenizer, self.chat_template_kwargs)
        # Padding on the right, as in the training of reward models.
        rows = []
        for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
            rows.append([*prompt, *completion])

        batch = self.tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
        logits = self.model(**batch.to(self.model.device)).logits
        return logits[:, 0].float().tolist()

    def _tokenize(self, completions: Sequence[Prompt]) -> list[list[int]]:
        rows = []
        for completion in completions:
            text = completion if isinstance(completion, str) else completion[0]["content"]
            ids = self.tokenizer(text=text, add_special_tokens=False)["input_ids"]
            rows.append([*ids, self.tokenizer.eos_token_id])
        return rows


def check_rewards(values: object, count: int, owner: str) -> list[float]:
    """Return what a reward function has returned as numbers, with NaN for None.

    :param values: list, array or tensor with a number or None per completion
    :param count: number of completions
    :param owner: function in messages, such as ``"reward function 'brevity'"``
    :raises ValueError: if it is anything else
    """
    # Arrays and tensors
    if hasattr(values, "tolist"):
        values = values.tolist()
    # A text or a dictionary can be iterated over, but it is a mistake.
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        raise ValueError(f"{owner} returned a {type(values).__name__}; {_ALLOWED}")

    numbers = []
    for value in values:
        if value is None:
            value = math.nan
        # Tensors and numbers of NumPy convert; so would texts.
        if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            raise ValueError(f"{owner} returned {value!r} for a completion; {_ALLOWED}")
        numbers.append(float(value))

    if len(numbers) != count:
        raise ValueError(f"{owner} returned {len(numbers)} rewards for {count} completions")
    return numbers


def checked_function(
    function: Callable[..., Any],
    name: str,
    timeout: float,
) -> Callable[..., Any]:
    """Return a reward function whose rewards and time are checked.

    :param function: reward function as in TRL, synchronous or not
    :param name: name of the function in messages
    :param timeout: seconds for a call
    """
    owner = f"reward function {name!r}"

    # TRL calls reward functions by keyword, and reads their names for logs.
    @functools.wraps(function)
    def checked(*, prompts: Sequence[Prompt], **keywords: object) -> list[float]:
        with limited(timeout, owner):
            values = function(prompts=prompts, **keywords)
        return check_rewards(values, len(prompts), owner)

    # An object may have an asynchronous __call__.
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    if not is_async:
        return checked

    # TRL awaits it in a thread, which no signal interrupts.
    @functools.wraps(function)
    async def checked_async(*, prompts: Sequence[Prompt], **keywords: object) -> list[float]:
        try:
            values = await asyncio.wait_for(function(prompts=prompts, **keywords), timeout)
        except TimeoutError as error:
            raise _overdue(owner, timeout) from error
        return check_rewards(values, len(prompts), owner)

    return checked_async


class _OverdueError(BaseException):
    """Interrupt a function; no Exception, which the function might catch."""


def _overdue(owner: str, seconds: float) -> TimeoutError:
    return TimeoutError(f"{owner} has not returned after {seconds:g} seconds; if it waits for a server, look there")


@contextlib.contextmanager
def limited(seconds: float, owner: str) -> Iterator[None]:
    """Interrupt a block that takes too long, such as one that waits for a server without end.

    Python can interrupt its main thread only, and not on Windows; elsewhere, a block is not limited. Neither is a block that
    sets an alarm of its own.

    :param seconds: time for the block
    :param owner: what the block does, for the message
    :raises TimeoutError: if it takes longer
    """
    can_interrupt = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not can_interrupt or signal.getitimer(signal.ITIMER_REAL)[0] > 0.0:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _OverdueError

    # The block gets the handler of the process back.
    start = time.monotonic()
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _OverdueError:
        raise _overdue(owner, seconds) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)

    # The block may have caught the interruption.
    if time.monotonic() - start > seconds:
        raise _overdue(owner, seconds)


def load_classifier(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    argument: str,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str]]:
    """Load a model with a score, and its tokenizer.

    :param name: Hub id or directory of a model, or of a LoRA adapter, which is merged into its base model
    :param tokenizer: tokenizer of the policy
    :param argument: name of the argument in messages
    :param trust_remote_code: whether code that comes with the model may run
    :return: the model, its tokenizer, and the names of the parameters that it lacked and that are new
    :raises ValueError: if it cannot be loaded, or has another tokenizer than the policy
    """
    # The policy's tokens would be other words.
    own_tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
    if tokenizer.get_vocab() != own_tokenizer.get_vocab():
        sizes = f"({len(own_tokenizer)} tokens) than the policy ({len(tokenizer)})"
        raise ValueError(f"{argument}={name!r} has another tokenizer {sizes}")

    # An adapter contains its score, so that nothing is missing.
    path = model_path(name)
    if find_adapter_config_file(path) is not None:
        adapted = AutoPeftModelForSequenceClassification.from_pretrained(
            path,
            num_labels=1,
            trust_remote_code=trust_remote_code,
        )
        return adapted.merge_and_unload(), own_tokenizer, []

    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path,
            num_labels=1,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except RuntimeError as error:
        # transformers has printed what differs.
        raise ValueError(f"{argument}={name!r} is no classifier with one label: {error}") from error
    return model, own_tokenizer, sorted(report["missing_keys"])
