"""GRPO with a shaping function: TRL's trainer with another objective of the ratio."""

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from sb3_ano.llm.config import GANOConfig, ShapedGRPOConfig
from sb3_ano.llm.data import check_prompts
from sb3_ano.llm.resume import EpochSampler, RestoresRenamedParameters, load_rollout, save_rollout
from sb3_ano.shaping import MAX_LOG_RATIO, ShapingLike, as_pair, name_of, ppo, surrogate


class ShapedGRPOTrainer(RestoresRenamedParameters, GRPOTrainer):
    """Train with TRL's ``GRPOTrainer``, with ``f`` and ``g`` of Definition 3.2 instead of the clip of the ratio.

    TRL computes the current log-probabilities before it reads the advantages and the log-probabilities at generation.
    In between, this class replaces the old log-probabilities by the current ones, so that TRL's own ratio is 1 and its clip
    does nothing, and the advantages by the shaped objective. Masks, loss types, evaluation, LoRA and vLLM stay TRL's. With
    PPO's shape nothing is replaced, because TRL's clip is that shape.

    It logs ``ratio/mean``, ``ratio/max``, ``ratio/outside_low``, ``ratio/outside_high`` and ``approx_kl`` in addition to
    TRL's metrics, at the level of ``importance_sampling_level``; in evaluations the ratio is 1. With ``kl_in="reward"``,
    ``rewards/kl/mean`` is the sum over a completion, and ``kl`` is what TRL logs with the KL divergence in the loss.
    Checkpoints also contain the completions in use, so that a training can resume from any of them.

    :param model: model, or its Hub id or directory
    :param reward_funcs: reward models and functions, as in TRL
    :param args: settings; by default those of the trainer's own class of settings
    :param train_dataset: data set with a column ``prompt``
    :param eval_dataset: data set for evaluations
    :param processing_class: tokenizer or processor; the model's by default
    :param shaping: callable ``h(x)`` or anything else that :func:`sb3_ano.shaping.resolve` takes; ``args.shaping`` by default
    :param kwargs: the other arguments of ``GRPOTrainer``
    :raises ValueError: if the tokenizer has no EOS token, or the data set has no prompts
    :raises TypeError: if ``args`` are settings of another trainer
    """

    config_class: type[ShapedGRPOConfig] = ShapedGRPOConfig
    args: ShapedGRPOConfig
    beta: float
    reward_funcs: list[Any]
    reward_func_names: list[str]
    reward_processing_classes: list[Any]
    reward_weights: torch.Tensor
    _tag_names = ["trl", "grpo", "sb3-ano"]  # noqa: RUF012
    _name = "GRPO with a shaping function"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: ShapedGRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        shaping: ShapingLike | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            args = self.config_class("trainer_output")
        if not isinstance(args, ShapedGRPOConfig):
            raise TypeError(f"args is a {type(args).__name__}; allowed are ShapedGRPOConfig and GANOConfig")
        self.shape = as_pair(args.shaping if shaping is None else shaping)
        if shaping is not None:
            args.shaping = str(name_of(shaping))  # for logs and checkpoints
        self._replaces_clip = not (self.shape.f is self.shape.g is ppo)
        self._loss_inputs: dict[str, Any] | None = None
        # Arguments, keyword arguments and log-probabilities of each forward pass over the completions being scored.
        self._scored: list[tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]] = []
        self._is_scoring = False
        self._tool_mask: list[list[int]] | None = None
        if train_dataset is not None and kwargs.get("environment_factory") is None:
            check_prompts(train_dataset, "train_dataset")
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class, **kwargs)
        if self._tokenizer.eos_token_id is None:
            name = self._tokenizer.name_or_path or "the model"
            raise ValueError(f"the tokenizer of {name!r} has no eos_token, without which no completion ends; set eos_token")
        self._kl_in_reward = args.kl_in == "reward" and self.beta != 0.0
        if self._kl_in_reward:
            self._add_kl_to_rewards()
        self._warn_where_the_ratio_stays_1()

    def _add_kl_to_rewards(self) -> None:
        """Add the KL divergence as a reward, so that weighting, gathering, normalization and logging stay TRL's."""
        self.reward_funcs = [*self.reward_funcs, self._kl_to_reference]
        self.reward_func_names = [*self.reward_func_names, "kl"]
        self.reward_processing_classes = [*self.reward_processing_classes, None]
        self.reward_weights = torch.cat([self.reward_weights, torch.tensor([-self.beta])])

    def _warn_where_the_ratio_stays_1(self) -> None:
        passes = self.args.steps_per_generation * self.num_iterations
        if self._replaces_clip and self.args.gradient_accumulation_steps % passes == 0:
            warnings.warn(
                f"shaping={self.args.shaping!r} cannot act: each completion is used for one update only (num_iterations="
                f"{self.num_iterations}, steps_per_generation={self.args.steps_per_generation}, gradient_accumulation_steps="
                f"{self.args.gradient_accumulation_steps}), so the ratio is 1; num_iterations=2 or more lets it act",
                stacklevel=3,
            )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        inputs = self._loss_inputs = dict(inputs)  # a copy, because TRL reads the originals again in the next iteration
        beta, self.beta = self.beta, 0.0 if self._kl_in_reward else self.beta  # TRL adds beta * KL to the loss
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self._loss_inputs, self.beta = None, beta
        if self._replaces_clip:
            if not inputs.get("is_shaped"):
                raise RuntimeError(
                    "the loss has not asked for log-probabilities, so that no shape acts; is this TRL's own loss?"
                )
            for name in [name for name in self._mode_metrics() if name.startswith("clip_ratio/")]:
                del self._mode_metrics()[name]  # TRL's clip has only seen a ratio of 1
        return loss

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*arguments, **keywords)
        if self._loss_inputs is not None:
            self._shape(self._loss_inputs, result[0])
        elif self._is_scoring:
            self._scored.append((arguments, keywords, result[0]))
        return result

    def _shape(self, inputs: dict[str, Any], logps: torch.Tensor) -> None:
        """Replace the advantages by the shaped objective, and make TRL's own ratio 1.

        :param inputs: the batch that TRL's loss is about to read
        :param logps: current log-probabilities, ``(batch, tokens)``
        """
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        old_logps = inputs.get("old_per_token_logps")
        log_ratio = logps - (logps.detach() if old_logps is None else old_logps)
        seen = mask
        if self.importance_sampling_level == "sequence":
            log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
            seen = mask.any(dim=-1, keepdim=True)
        to_ref = inputs["ref_per_token_logps"] - logps.detach() if self._kl_in_reward else torch.zeros_like(logps)
        self._log(log_ratio.detach(), seen.bool(), to_ref, mask)
        if not self._replaces_clip:
            return
        advantages = inputs["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        radii = {"eps_low": self.epsilon_low, "eps_high": self.epsilon_high}
        inputs["advantages"] = surrogate(log_ratio, advantages, self.shape, **radii)
        # Not detached: the gradients through both then cancel, and the objective's own gradient remains.
        inputs.update(old_per_token_logps=logps, is_shaped=True)

    def _mode_metrics(self) -> dict[str, list[float]]:
        return self._metrics["train" if self.model.training else "eval"]

    @torch.no_grad()
    def _log(self, log_ratio: torch.Tensor, seen: torch.Tensor, to_ref: torch.Tensor, mask: torch.Tensor) -> None:
        """Log statistics of the ratio, and the KL divergence as TRL does if it is in the loss, over all processes.

        :param log_ratio: ``(batch, tokens)``, or ``(batch, 1)`` for sequences
        :param seen: elements of ``log_ratio`` that count
        :param to_ref: ``log pi_ref - log pi``, ``(batch, tokens)``
        :param mask: tokens that count
        """
        log_ratio = torch.where(seen, log_ratio.float(), 0.0).clamp(max=MAX_LOG_RATIO)
        deviation = torch.expm1(log_ratio)  # r - 1, zero where it does not count
        kl = (torch.expm1(to_ref) - to_ref) * mask
        columns = (deviation + seen, deviation < -self.epsilon_low, deviation > self.epsilon_high, deviation - log_ratio)
        local = torch.stack([values.float().sum() for values in (seen, mask, kl, *columns)])
        count, tokens, kl_sum, *sums = self.accelerator.reduce(local, reduction="sum").tolist()
        metrics = self._mode_metrics()
        for name, total in zip(("ratio/mean", "ratio/outside_low", "ratio/outside_high", "approx_kl"), sums, strict=True):
            metrics[name].append(total / max(count, 1.0))
        if self._kl_in_reward:
            metrics["kl"].append(kl_sum / max(tokens, 1.0))
        maximum = torch.where(seen, deviation + 1.0, 0.0).max().reshape(1)
        metrics["ratio/max"].append(self.accelerator.gather(maximum).max().item())

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        self._tool_mask = generated[2]
        self._scored.clear()  # a rollout_func may have asked for log-probabilities
        return generated

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._is_scoring = True
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self._is_scoring, self._tool_mask = False, None
            self._scored.clear()

    def _calculate_rewards(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*arguments, **keywords)
        if self._kl_in_reward:
            # TRL ignores completions that no reward function could score; the KL divergence alone is not a score.
            rewards[:, -1].masked_fill_(rewards[:, :-1].isnan().all(dim=1), torch.nan)
        return rewards

    def _kl_to_reference(self, **_: Any) -> list[float]:
        """Return ``log pi_old - log pi_ref`` of each completion, summed over the tokens that the policy wrote."""
        # TRL computes the policy's log-probabilities first, unless it needs none, and those of the reference last.
        arguments, keywords, ref_logps = self._scored[-1]
        if len(self._scored) > 1:
            old_logps = self._scored[0][2]
        else:
            with torch.no_grad():
                old_logps = self._get_per_token_logps_and_entropies(self.model, *arguments[1:], **keywords)[0]
        _, _, attention_mask, length = arguments
        mask = attention_mask[:, -length:].clone()
        for row, own in zip(mask, self._tool_mask or (), strict=False):
            row[: len(own)] *= torch.tensor(own, device=row.device)
        return ((old_logps - ref_logps) * mask).sum(-1).tolist()

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        return EpochSampler(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if not self.args.save_only_model:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            save_rollout(self, Path(self._get_output_dir(trial=trial), name))
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_rollout(self, Path(checkpoint))


class GANOTrainer(ShapedGRPOTrainer):
    """Train with GANO: GRPO with ANO's shape and the KL divergence in the reward (:class:`GANOConfig`)."""

    config_class = GANOConfig
    _tag_names = ["trl", "grpo", "gano", "sb3-ano"]  # noqa: RUF012
    _name = "GANO"
