"""PPO, SPO and ANO with a critic, as the paper trains language models: on the trainer of GRPO, with other advantages."""

import contextlib
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from sb3_ano.llm.config import ShapedGRPOConfig, ShapedPPOConfig
from sb3_ano.llm.dropout import disable_dropout, restored
from sb3_ano.llm.grpo import Reward, ShapedGRPOTrainer, policy_mask
from sb3_ano.llm.resume import load_weights
from sb3_ano.llm.rewards import LearnedReward, load_classifier
from sb3_ano.shaping import ShapingLike

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig


class Critic(torch.nn.Module):
    """Predict the return at every token with a reward model, whose score is read at every token instead of the last one.

    :param model: sequence classifier with one label
    :raises ValueError: if the model has no linear layer ``score`` with one output
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        if getattr(getattr(model, "score", None), "out_features", None) != 1:
            raise ValueError(
                f"value_model is a {type(model).__name__}; allowed are classifiers with a layer 'score' for one label"
            )
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return values, ``(batch, tokens)``."""
        # Prompts are padded on the left, unlike in the training of reward models.
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": positions}
        hidden_states = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        return self.model.score(hidden_states).squeeze(-1)


class ShapedPPOTrainer(ShapedGRPOTrainer):
    """Train with PPO, with a critic and a shaping function: ANO's by default, or that of ``args.shaping`` or ``shaping``.

    The reward of a token is ``-beta * (log pi_old - log pi_ref)``, plus the score for the last token of a completion.
    Advantages are estimated by GAE and whitened over the tokens of all completions of a generation; TRL's loss takes one
    per token. The critic is a second model, which starts as the reward model. Its parameters are in the policy's optimizer,
    but its gradients are clipped apart from the policy's. Checkpoints contain it.

    It logs ``critic/loss``, ``critic/clip_ratio`` (fraction of clipped values), ``critic/value`` and ``critic/return`` in
    addition to the metrics of :class:`~sb3_ano.llm.ShapedGRPOTrainer`.

    :param model: model, or its Hub id or directory
    :param reward_funcs: reward models and functions, as in TRL
    :param args: settings; by default those of the trainer's own class of settings
    :param train_dataset: data with a column ``prompt``; its other columns are arguments of the reward functions
    :param eval_dataset: data of evaluations, or several by name
    :param processing_class: tokenizer of the policy; that of the model by default
    :param reward_processing_classes: tokenizers of reward models
    :param callbacks: callbacks of transformers
    :param optimizers: optimizer and schedule, as in transformers; the critic's parameters are added
    :param quantization_config: quantization of the policy
    :param peft_config: adapter to train instead of the whole policy
    :param tools: functions that the policy may call, as in TRL
    :param rollout_func: function that generates completions, as in TRL
    :param environment_factory: environments of the policy, as in TRL
    :param shaping: as for :class:`~sb3_ano.llm.ShapedGRPOTrainer`
    :param value_model: start of the critic, a classifier of sequences with one label, or its Hub id or directory; the first
        reward model by default. A language model gets a new score.
    :raises ValueError: if there is no model to start the critic from, or it cannot be a critic
    """

    config_class = ShapedPPOConfig
    args: ShapedPPOConfig
    # Of the completions being scored: scores, and KL divergence of each token.
    _rollout_rewards: tuple[torch.Tensor, torch.Tensor | None]
    _tag_names = ["trl", "ppo", "sb3-ano"]  # noqa: RUF012

    def __init__(
        self,
        model: str | torch.nn.Module,
        reward_funcs: Reward | Sequence[Reward] | None = None,
        args: ShapedPPOConfig | None = None,
        train_dataset: "Dataset | IterableDataset | None" = None,
        eval_dataset: "Dataset | IterableDataset | dict[str, Dataset] | dict[str, IterableDataset] | None" = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: "BitsAndBytesConfig | None" = None,
        peft_config: "PeftConfig | None" = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Any = None,
        *,
        shaping: ShapingLike | None = None,
        value_model: str | torch.nn.Module | None = None,
    ) -> None:
        # Before TRL wraps the reward models.
        start: Any = copy.deepcopy(_first_reward_model(reward_funcs) if value_model is None else value_model)
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            optimizers,
            quantization_config,
            peft_config,
            tools,
            rollout_func,
            environment_factory,
            shaping=shaping,
        )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError("a critic is not allowed with DeepSpeed or FSDP, which shard one model; use DDP, or GANO")
        if self._is_vlm:
            raise ValueError("a critic reads text only; allowed are policies with a tokenizer instead of a processor")
        if isinstance(start, str):
            name = start
            start, _, missing = load_classifier(name, self._tokenizer, "value_model", self.args.trust_remote_code)
            if lacking := set(missing) - {"score.weight"}:
                raise ValueError(f"value_model={name!r} lacks {min(lacking)}; only the layer 'score' may be new")
        # Always, because values at generation and in the loss are compared.
        self._critic_dropout = disable_dropout(start)
        critic = Critic(start.to(torch.promote_types(start.dtype, torch.float32)).requires_grad_(True)).train()
        if self.args.gradient_checkpointing:
            start.gradient_checkpointing_enable(self.args.gradient_checkpointing_kwargs)
        # Not a part of the policy: vLLM's weights, LoRA and saved models are made of the policy's parameters.
        self.critic = self.accelerator.prepare_model(critic)
        self.add_callback(_CriticGradients(critic, self.args.max_grad_norm))

    def _method(self, args: ShapedGRPOConfig) -> str:
        return f"PPO with shaping={args.shaping!r}" if self.algorithm is None else self.algorithm.upper()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Add the critic's parameters to the policy's optimizer, with weight decay for the same kinds of parameters."""
        optimizer = super().create_optimizer(model)
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if id(next(self.critic.parameters())) not in known:  # in a second training they are
            decaying = self.get_decay_parameter_names(self.critic)
            for decay, decays in ((self.args.weight_decay, True), (0.0, False)):
                params = [value for name, value in self.critic.named_parameters() if (name in decaying) == decays]
                optimizer.add_param_group({"params": params, "weight_decay": decay})
        return optimizer

    def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Run a forward and a backward pass; processes average the critic's gradients before updates only."""
        with contextlib.nullcontext() if self.accelerator.sync_gradients else self.accelerator.no_sync(self.critic):
            return super().training_step(*arguments, **keywords)

    def _calculate_rewards(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*arguments, **keywords)  # of all processes
        scores = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        scores[rewards.isnan().all(dim=1)] = torch.nan
        count = len(rewards) // self.accelerator.num_processes
        start = count * self.accelerator.process_index
        kl = self._kl_to_reference() if self._kl_in_reward else None
        if kl is not None:
            self._mode_metrics()["rewards/kl/mean"].append(self.accelerator.gather(kl.sum(1)).mean().item())
        self._rollout_rewards = scores[start : start + count], kl
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        scores, kl = self._rollout_rewards
        mask = policy_mask(batch)
        with torch.no_grad():
            values = self._values(self.accelerator.unwrap_model(self.critic), batch)
        rewards = token_rewards(scores.nan_to_num(), kl, mask, self.beta)
        advantages = gae(rewards, values, mask, self.args.gamma, self.args.lam)
        # A completion without a score teaches neither policy nor critic.
        scored = ~scores.isnan().unsqueeze(1)
        batch["values"], batch["returns"] = values, values + advantages * scored
        batch["advantages"] = whiten(advantages, mask * scored, lambda sums: self.accelerator.reduce(sums, "sum"))
        # TRL has logged what groups of one completion come to: advantages of 0, and no deviation.
        means = self.accelerator.gather(batch["advantages"].sum(1) / mask.sum(1).clamp(min=1)).tolist()
        logged = self._logs["advantages"]
        self._logs["advantages"] = type(logged)([*list(logged)[: -len(means)], *means], logged.maxlen)
        self._mode_metrics().pop("frac_reward_zero_std", None)
        return batch

    def _values(self, critic: Any, batch: dict[str, Any]) -> torch.Tensor:
        """Return the value before each token of the completions, ``(batch, tokens)``."""
        size = self.args.per_device_train_batch_size
        ids, masks = (torch.cat([batch[f"prompt_{of}"], batch[f"completion_{of}"]], 1).split(size) for of in ("ids", "mask"))
        values = torch.cat([critic(*part) for part in zip(ids, masks, strict=True)])
        return values[:, -batch["completion_ids"].shape[1] - 1 : -1]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        mask = policy_mask(inputs)
        values = self._values(self.critic, inputs)
        losses, clipped = value_loss(values, inputs["values"], inputs["returns"], self.args.cliprange_value)
        targets = inputs["returns"]
        means = {"critic/loss": losses, "critic/clip_ratio": clipped, "critic/value": values, "critic/return": targets}
        self._log_means(mask, means)
        # The mean that TRL takes of the policy's loss.
        steps = self.current_gradient_accumulation_steps if self.model.training else 1
        if self.loss_type == "bnpo":
            tokens = mask.sum().clamp(min=1.0) * steps
        else:
            tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            tokens = tokens * steps / self.args.steps_per_generation if self.model.training else tokens
        return loss + self.args.vf_coef * (losses * mask).sum() / tokens

    def save_critic(self, directory: str | Path) -> None:
        """Save the critic and its tokenizer in a directory, which ``value_model`` can name.

        :param directory: directory to write
        """
        if self.args.should_save:
            with restored(self._critic_dropout):
                self.accelerator.unwrap_model(self.critic).model.save_pretrained(directory)
            self._tokenizer.save_pretrained(directory)

    def push_to_hub(self, *arguments: Any, **keywords: Any) -> Any:
        """Push the policy, and with ``push_critic`` the critic in the directory ``critic``, to the Hub."""
        if self.args.push_critic:
            self.save_critic(Path(self.args.output_dir, "critic"))
        return super().push_to_hub(*arguments, **keywords)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._load_critic(Path(checkpoint, "critic"))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_critic(Path(str(self.state.best_model_checkpoint), "critic"))

    def _load_critic(self, directory: Path) -> None:
        load_weights(self.accelerator.unwrap_model(self.critic).model, directory)


class ANOTrainer(ShapedPPOTrainer):
    """Train with ANO: PPO with a critic, with ANO's shape instead of the clip (:class:`ShapedPPOConfig`)."""

    algorithm = "ano"


class SPOTrainer(ShapedPPOTrainer):
    """Train with SPO: PPO with a critic, with SPO's shape instead of the clip (:class:`ShapedPPOConfig`)."""

    algorithm = "spo"


class PPOTrainer(ShapedPPOTrainer):
    """Train with PPO and a critic (:class:`ShapedPPOConfig`)."""

    algorithm = "ppo"


class _CriticGradients(TrainerCallback):
    """Clip the critic's gradients, and clear them after the update; transformers does both for the policy only."""

    def __init__(self, critic: Critic, max_grad_norm: float) -> None:
        self.critic, self.max_grad_norm = critic, max_grad_norm

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Clip the gradients."""
        if self.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.critic.parameters(), self.max_grad_norm)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Clear the gradients."""
        self.critic.zero_grad()


def token_rewards(scores: torch.Tensor, kl: torch.Tensor | None, mask: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the reward of each token: minus ``beta`` times its KL divergence, and the score at the last token.

    :param scores: ``(batch,)``
    :param kl: ``log pi_old - log pi_ref``, ``(batch, tokens)``; None if the loss has the KL divergence
    :param mask: tokens that the policy wrote, ``(batch, tokens)``
    :param beta: coefficient of the KL divergence
    """
    is_last = (mask.cumsum(1) == mask.sum(1, keepdim=True)) & mask.bool()
    rewards = is_last * scores.unsqueeze(1)
    return rewards if kl is None else rewards - beta * kl * mask


def gae(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """Return generalized advantage estimates, 0 where the mask is; steps are the tokens that the policy wrote.

    :param rewards: ``(batch, tokens)``
    :param values: values of the states before the tokens, ``(batch, tokens)``; the last state's successor has none
    :param mask: tokens that the policy wrote, ``(batch, tokens)``
    :param gamma: discount factor
    :param lam: decay of the temporal-difference errors
    """
    advantages = torch.zeros_like(values)
    advantage = next_value = values.new_zeros(len(values))
    for token in reversed(range(values.shape[1])):
        written = mask[:, token].bool()
        error = rewards[:, token] + gamma * next_value - values[:, token]
        advantage = torch.where(written, error + gamma * lam * advantage, advantage)
        next_value = torch.where(written, values[:, token], next_value)
        advantages[:, token] = advantage * written
    return advantages


def whiten(values: torch.Tensor, mask: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Shift and scale values to mean 0 and variance 1 over the tokens of all processes, 0 where the mask is.

    :param values: ``(batch, tokens)``
    :param mask: tokens that count, ``(batch, tokens)``
    :param total: function that sums a tensor over all processes
    """
    count, value_sum = total(torch.stack([mask.sum().to(values.dtype), (values * mask).sum()]))
    centered = (values - value_sum / count.clamp(min=1.0)) * mask
    variance = total(centered.square().sum()) / (count - 1.0).clamp(min=1.0)
    return centered * torch.rsqrt(variance + 1e-8)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return half the squared error of each value, or that of the clipped value if it is larger; and where it is.

    :param values: current values, ``(batch, tokens)``
    :param old_values: values at generation
    :param returns: targets
    :param clip_range: largest difference between current and old values
    """
    clipped_values = old_values + (values - old_values).clamp(-clip_range, clip_range)
    loss, clipped_loss = ((prediction - returns).square() for prediction in (values, clipped_values))
    return 0.5 * torch.maximum(loss, clipped_loss), (clipped_loss > loss).to(values.dtype)


def _first_reward_model(reward_funcs: Any) -> Any:
    functions = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    models = [each for each in functions if isinstance(each, LearnedReward | str | PreTrainedModel)]
    if not models:
        raise ValueError("there is no reward model that the critic could start from; give value_model, such as the policy")
    return models[0].model if isinstance(models[0], LearnedReward) else models[0]
