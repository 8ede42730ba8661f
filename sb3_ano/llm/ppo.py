"""PPO, SPO and ANO with a critic, as the paper trains language models: on the trainer of GRPO, with other advantages."""

import contextlib
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from sb3_ano.llm.config import ShapedPPOConfig
from sb3_ano.llm.grpo import Batch, Reward, ShapedGRPOTrainer, TrainerOptions, disable_dropout, optimized, policy_mask
from sb3_ano.llm.resume import load_weights
from sb3_ano.llm.rewards import LearnedReward, load_classifier
from sb3_ano.shaping import ShapingLike


class Critic(nn.Module):
    """Predict the return at every token with a reward model, whose score is read at every token instead of the last one.

    :param model: sequence classifier with one label
    :raises ValueError: if the model has no linear layer ``score`` with one output
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        score = getattr(model, "score", None)
        if getattr(score, "out_features", None) != 1:
            raise ValueError(
                f"value_model is a {type(model).__name__}; allowed are classifiers with a layer 'score' for one label"
            )
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return values, ``(batch, tokens)``."""
        # Prompts are padded on the left, unlike in the training of reward models.
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        outputs = self.model.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            use_cache=False,
        )
        return self.model.score(outputs.last_hidden_state).squeeze(-1)


class ShapedPPOTrainer(ShapedGRPOTrainer):
    """Train with PPO, with a critic and a shaping function: ANO's by default, or that of ``args.shaping`` or ``shaping``.

    The reward of a token is ``-beta * (log pi_old - log pi_ref)``, plus the score for the last token of a completion.
    Advantages are estimated by GAE and whitened over the tokens of all completions of a generation; TRL's loss takes one
    per token. The critic is a second model, which starts as the reward model. Its loss is a part of the objective that TRL
    averages, also with PPO's shape. Its parameters are in the policy's optimizer, but its gradients are clipped apart from the
    policy's. Checkpoints contain it.

    It logs ``critic/loss``, ``critic/clip_ratio`` (fraction of clipped values), ``critic/value`` and ``critic/return`` in
    addition to the metrics of :class:`~sb3_ano.llm.ShapedGRPOTrainer`.

    :param model: model, or its Hub id or directory
    :param reward_funcs: reward models and functions, as in TRL
    :param args: settings; by default those of the trainer's own class of settings
    :param train_dataset: data with a column ``prompt``; its other columns are arguments of the reward functions
    :param eval_dataset: data of evaluations, or several by name
    :param processing_class: tokenizer of the policy; that of the model by default
    :param shaping: as for :class:`~sb3_ano.llm.ShapedGRPOTrainer`
    :param value_model: start of the critic, a classifier of sequences with one label, or its Hub id or directory; the first
        reward model by default. A language model gets a new score.
    :param options: further arguments of TRL's trainer, by name, see :class:`~sb3_ano.llm.grpo.TrainerOptions`; the critic's
        parameters are added to the optimizer of ``optimizers``
    :raises ValueError: if there is no model to start the critic from, or it cannot be a critic
    """

    config_class = ShapedPPOConfig
    args: ShapedPPOConfig
    _name = "PPO with a shaping function"
    _tag_names = ["trl", "ppo", "sb3-ano"]  # noqa: RUF012

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Reward | Sequence[Reward] | None = None,
        args: ShapedPPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset] | dict[str, IterableDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        *,
        shaping: ShapingLike | None = None,
        value_model: str | nn.Module | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        # A copy, before TRL wraps the reward models.
        start: Any = value_model
        if start is None:
            start = _first_reward_model(reward_funcs)
        start = copy.deepcopy(start)
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            shaping=shaping,
            **options,
        )

        # What the critic cannot do
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError("a critic is not allowed with DeepSpeed or FSDP, which shard one model; use DDP, or GANO")
        if self._is_vlm:
            raise ValueError("a critic reads text only; allowed are policies with a tokenizer instead of a processor")

        # A language model has no score, but whatever else is missing would stay random.
        if isinstance(start, str):
            name = start
            trust = self.args.trust_remote_code
            start, _, missing = load_classifier(name, self._tokenizer, "value_model", trust)
            lacking = set(missing) - {"score.weight"}
            if lacking:
                raise ValueError(f"value_model={name!r} lacks {min(lacking)}; only the layer 'score' may be new")

        # Always without dropout, because values at generation and in the loss are compared.
        disable_dropout(start)
        # Updates are too small for bfloat16.
        start = start.to(torch.promote_types(start.dtype, torch.float32))
        if self.args.gradient_checkpointing:
            start.gradient_checkpointing_enable(self.args.gradient_checkpointing_kwargs)
        critic = Critic(start.requires_grad_(True)).train()

        # Not a part of the policy: vLLM's weights, LoRA and saved models are made of the policy's parameters.
        self.critic = self.accelerator.prepare_model(critic)
        self.add_callback(_CriticGradients(critic, self.args.max_grad_norm))

        # Scores of the completions of a generation
        self._scores: Tensor

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Add the critic's parameters to the policy's optimizer, with weight decay for the same kinds of parameters."""
        optimizer = super().create_optimizer(model)

        # A second training finds them there.
        first = next(self.critic.parameters())
        if id(first) in optimized(optimizer):
            return optimizer

        names = self.get_decay_parameter_names(self.critic)
        decaying: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.critic.named_parameters():
            if name in names:
                decaying.append(parameter)
            else:
                others.append(parameter)
        optimizer.add_param_group({"params": decaying, "weight_decay": self.args.weight_decay})
        optimizer.add_param_group({"params": others, "weight_decay": 0.0})
        return optimizer

    def training_step(
        self,
        model: nn.Module,
        inputs: Batch,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        """Run a forward and a backward pass; processes average the critic's gradients before updates only."""
        # transformers does this for the policy.
        averages = self.accelerator.sync_gradients
        with contextlib.nullcontext() if averages else self.accelerator.no_sync(self.critic):
            return super().training_step(model, inputs, num_items_in_batch)

    def _calculate_rewards(self, *arguments: Any) -> Tensor:
        rewards = super()._calculate_rewards(*arguments)
        weights = self.reward_weights.to(rewards.device)
        scores = (rewards * weights).nansum(dim=1)
        scores[rewards.isnan().all(dim=1)] = torch.nan

        # Rewards are those of all processes.
        count = len(rewards) // self.accelerator.num_processes
        start = count * self.accelerator.process_index
        self._scores = scores[start : start + count]

        # As GRPO logs it if the completion pays for it
        if self._kl_in_reward:
            kl = self.accelerator.gather(self._kl.sum(1)).mean()
            self._mode_metrics()["rewards/kl/mean"].append(kl.item())
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        batch = super()._generate_and_score_completions(inputs)
        mask = policy_mask(batch)

        # Without the synchronization of DDP, which is for updates.
        with torch.no_grad():
            values = self._values(self.accelerator.unwrap_model(self.critic), batch)

        # Rewards, and what they say about each token
        kl = self._kl if self._kl_in_reward else None
        rewards = token_rewards(self._scores.nan_to_num(), kl, mask, self.beta)
        advantages = gae(rewards, values, mask, self.args.gamma, self.args.lam)

        # A completion without a score teaches neither policy nor critic.
        scored = ~self._scores.isnan().unsqueeze(1)
        batch["values"] = values
        batch["returns"] = values + advantages * scored
        batch["advantages"] = whiten(
            advantages,
            mask * scored,
            lambda sums: self.accelerator.reduce(sums, "sum"),
        )

        # TRL has logged what groups of one completion come to: advantages of 0, and no deviation.
        lengths = mask.sum(1).clamp(min=1)
        means = batch["advantages"].sum(1) / lengths
        means = self.accelerator.gather(means)
        logged = self._logs["advantages"]
        for _ in means:
            logged.pop()
        logged.extend(means.tolist())
        self._mode_metrics().pop("frac_reward_zero_std", None)
        return batch

    def _values(self, critic: nn.Module, batch: Batch) -> Tensor:
        """Return the value before each token of the completions, ``(batch, tokens)``."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)

        # As many at once as in the loss
        size = self.args.per_device_train_batch_size
        parts = []
        for start in range(0, len(ids), size):
            part = slice(start, start + size)
            parts.append(critic(ids[part], mask[part]))

        # The value before a token is read at the token before it.
        length = batch["completion_ids"].shape[1]
        return torch.cat(parts)[:, -length - 1 : -1]

    def _objective(self, inputs: Batch, log_ratio: Tensor, old_log_prob: Tensor) -> Tensor:
        values = self._values(self.critic, inputs)
        losses, clipped = value_loss(
            values,
            inputs["values"],
            inputs["returns"],
            self.args.cliprange_value,
        )
        means = {
            "critic/loss": losses,
            "critic/clip_ratio": clipped,
            "critic/value": values,
            "critic/return": inputs["returns"],
        }
        self._log_means(policy_mask(inputs), means)

        # TRL takes the same mean of both.
        return super()._objective(inputs, log_ratio, old_log_prob) - self.args.vf_coef * losses

    def save_critic(self, directory: str | Path) -> None:
        """Save the critic and its tokenizer in a directory, which ``value_model`` can name.

        :param directory: directory to write
        """
        if self.args.should_save:
            self.accelerator.unwrap_model(self.critic).model.save_pretrained(directory)
            self._tokenizer.save_pretrained(directory)

    def push_to_hub(self, *arguments: Any, **keywords: Any) -> Any:
        """Push the policy, and with ``push_critic`` the critic in the directory ``critic``, to the Hub."""
        # transformers pushes the whole output directory.
        if self.args.push_critic:
            self.save_critic(Path(self.args.output_dir, "critic"))
        return super().push_to_hub(*arguments, **keywords)

    def _load_critic(self, directory: Path) -> None:
        load_weights(self.accelerator.unwrap_model(self.critic).model, directory)


class ANOTrainer(ShapedPPOTrainer):
    """Train with ANO: PPO with a critic, with ANO's shape instead of the clip (:class:`ShapedPPOConfig`)."""

    algorithm = "ano"
    _name = "ANO"


class SPOTrainer(ShapedPPOTrainer):
    """Train with SPO: PPO with a critic, with SPO's shape instead of the clip (:class:`ShapedPPOConfig`)."""

    algorithm = "spo"
    _name = "SPO"


class PPOTrainer(ShapedPPOTrainer):
    """Train with PPO and a critic (:class:`ShapedPPOConfig`)."""

    algorithm = "ppo"
    _name = "PPO"


class _CriticGradients(TrainerCallback):
    """Clip the critic's gradients, and clear them after the update; transformers does both for the policy only."""

    def __init__(self, critic: Critic, max_grad_norm: float) -> None:
        self.critic = critic
        self.max_grad_norm = max_grad_norm

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        """Clip the gradients."""
        if self.max_grad_norm > 0:
            nn.utils.clip_grad_norm_(self.critic.parameters(), self.max_grad_norm)

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        """Clear the gradients."""
        self.critic.zero_grad()


def token_rewards(
    scores: Tensor,
    kl: Tensor | None,
    mask: Tensor,
    beta: float,
) -> Tensor:
    """Return the reward of each token: minus ``beta`` times its KL divergence, and the score at the last token.

    :param scores: ``(batch,)``
    :param kl: ``log pi_old - log pi_ref``, ``(batch, tokens)``; None if the loss has the KL divergence
    :param mask: tokens that the policy wrote, ``(batch, tokens)``
    :param beta: coefficient of the KL divergence
    """
    # The last token that the policy wrote, after which there may be results of tools and padding.
    lengths = mask.sum(1, keepdim=True)
    is_last = (mask.cumsum(1) == lengths) & mask.bool()
    rewards = is_last * scores.unsqueeze(1)
    if kl is not None:
        rewards = rewards - beta * kl * mask
    return rewards


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """Return generalized advantage estimates, 0 where the mask is; steps are the tokens that the policy wrote.

    :param rewards: ``(batch, tokens)``
    :param values: values of the states before the tokens, ``(batch, tokens)``; the last state's successor has none
    :param mask: tokens that the policy wrote, ``(batch, tokens)``
    :param gamma: discount factor
    :param lam: decay of the temporal-difference errors
    """
    advantages = torch.zeros_like(values)
    # Of the token after the current one
    advantage = values.new_zeros(len(values))
    next_value = values.new_zeros(len(values))
    for token in reversed(range(values.shape[1])):
        written = mask[:, token].bool()
        value = values[:, token]
        error = rewards[:, token] + gamma * next_value - value

        # Other tokens are passed over, as if the next one followed directly.
        advantage = torch.where(written, error + gamma * lam * advantage, advantage)
        next_value = torch.where(written, value, next_value)
        advantages[:, token] = advantage * written
    return advantages


def whiten(
    values: Tensor,
    mask: Tensor,
    total: Callable[[Tensor], Tensor],
) -> Tensor:
    """Shift and scale values to mean 0 and variance 1 over the tokens of all processes, 0 where the mask is.

    :param values: ``(batch, tokens)``
    :param mask: tokens that count, ``(batch, tokens)``
    :param total: function that sums a tensor over all processes
    """
    mask = mask.to(values.dtype)
    sums = torch.stack([mask.sum(), (values * mask).sum()])
    count, value_sum = total(sums)
    centered = (values - value_sum / count.clamp(min=1.0)) * mask

    # The unbiased variance, as in TRL's former PPOTrainer
    squares = total(centered.square().sum())
    variance = squares / (count - 1.0).clamp(min=1.0)
    return centered * torch.rsqrt(variance + 1e-8)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    clip_range: float,
) -> tuple[Tensor, Tensor]:
    """Return half the squared error of each value, or that of the clipped value if it is larger; and where it is.

    :param values: current values, ``(batch, tokens)``
    :param old_values: values at generation
    :param returns: targets
    :param clip_range: largest difference between current and old values
    """
    clipped_values = old_values + (values - old_values).clamp(-clip_range, clip_range)
    loss = (values - returns).square()
    clipped_loss = (clipped_values - returns).square()

    # A value that has moved towards its target by more than the range gets no gradient.
    is_clipped = (clipped_loss > loss).to(values.dtype)
    return 0.5 * torch.maximum(loss, clipped_loss), is_clipped


def _first_reward_model(reward_funcs: Reward | Sequence[Reward] | None) -> Any:
    functions = reward_funcs
    if not isinstance(functions, list | tuple):
        functions = [functions]
    for function in functions:
        # TRL takes models and their names, too.
        if isinstance(function, LearnedReward):
            return function.model
        if isinstance(function, str | PreTrainedModel):
            return function
    raise ValueError("there is no reward model that the critic could start from; give value_model, such as the policy")
