"""GRPO with a shaping function: TRL's trainer, told of another objective for the ratio."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sb3_ano.extras import missing_extra
from sb3_ano.llm.config import GANOConfig, ShapedGRPOConfig
from sb3_ano.llm.data import check_prompts, check_tokenizer
from sb3_ano.llm.objective import RatioSums, shaped_objective
from sb3_ano.llm.resume import EpochSampler, RestoresRenamedParameters, load_rollout, save_rollout
from sb3_ano.shaping import ShapingLike, as_pair, name_of, ppo

try:
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
    from trl import GRPOTrainer
except ImportError as error:
    raise missing_extra("llm", error.name or "trl") from error


class _Scored(NamedTuple):
    """A call for log-probabilities while completions are scored."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    logps: torch.Tensor


class ShapedGRPOTrainer(RestoresRenamedParameters, GRPOTrainer):
    """TRL's ``GRPOTrainer`` with ``f`` and ``g`` of Definition 3.2 in place of the clip of the ratio.

    TRL reads the advantages and the log-probabilities at generation after it has asked for the current log-probabilities. In
    that moment this class puts the current ones in place of the old, so that TRL's own ratio is 1 and its clip does nothing,
    and the shaped objective in place of the advantages. Masks, loss types, evaluation, LoRA and vLLM stay TRL's. With PPO's
    shape nothing is replaced, because TRL's clip is that shape.

    It reports ``ratio/mean``, ``ratio/max``, ``ratio/outside_low``, ``ratio/outside_high`` and ``approx_kl`` beside TRL's
    metrics, at the level of ``importance_sampling_level``; in evaluations the ratio is 1. With ``kl_in="reward"``,
    ``rewards/kl/mean`` is the sum over a completion, and ``kl`` is what TRL reports with the divergence in the loss.
    Checkpoints also hold the completions in use, so that training can go on from any of them.

    :param model: model, or the id or folder of one
    :param reward_funcs: reward models and functions, as TRL takes them
    :param args: settings; None takes the defaults of the trainer's own class of settings
    :param shaping: a callable ``h(x)`` or whatever :func:`sb3_ano.shaping.resolve` takes; None takes ``args.shaping``
    :param kwargs: everything else that ``GRPOTrainer`` takes
    :raises ValueError: if the tokenizer has no end-of-sequence token, or the data lack prompts
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
            args.shaping = str(name_of(shaping))  # what logs and checkpoints say
        self._replaces_clip = not (self.shape.f is self.shape.g is ppo and args.dual == "paper")
        self._loss_inputs: dict[str, Any] | None = None
        self._scored: list[_Scored] = []
        self._is_scoring = False
        self._tool_mask: list[list[int]] | None = None
        if processing_class is not None:
            check_tokenizer(processing_class)
        if train_dataset is not None and kwargs.get("environment_factory") is None:
            check_prompts(train_dataset, "train_dataset")
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class, **kwargs)
        check_tokenizer(self._tokenizer)
        self._kl_in_reward = args.kl_in == "reward" and self.beta != 0.0
        if self._kl_in_reward:
            self._add_kl_to_rewards()
        self._warn_where_the_ratio_stays_1()

    def _add_kl_to_rewards(self) -> None:
        """One more reward, so that weighting, gathering, normalising and logging stay TRL's."""
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
                f"{self.args.gradient_accumulation_steps}), where the ratio is 1; num_iterations=2 or more lets it act",
                stacklevel=3,
            )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self._loss_inputs = dict(inputs)  # TRL uses its own again in the next iteration
        try:
            with self._without_kl_in_loss():
                loss = super()._compute_loss(model, self._loss_inputs)
        finally:
            self._loss_inputs = None
        if self._replaces_clip:
            for name in [name for name in self._mode_metrics() if name.startswith("clip_ratio/")]:
                del self._mode_metrics()[name]  # of TRL's clip, which has seen a ratio of 1
        return loss

    @contextmanager
    def _without_kl_in_loss(self) -> Iterator[None]:
        beta = self.beta
        self.beta = 0.0 if self._kl_in_reward else beta
        try:
            yield
        finally:
            self.beta = beta

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*arguments, **keywords)
        if self._loss_inputs is not None:
            self._shape(self._loss_inputs, result[0])
        elif self._is_scoring:
            self._scored.append(_Scored(arguments, keywords, result[0]))
        return result

    def _shape(self, inputs: dict[str, Any], logps: torch.Tensor) -> None:
        """Put the shaped objective in place of the advantages, and make TRL's own ratio 1."""
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        old_logps = inputs.get("old_per_token_logps")
        log_ratio = logps - (logps.detach() if old_logps is None else old_logps)
        self._report(log_ratio.detach(), logps.detach(), inputs.get("ref_per_token_logps"), mask)
        if not self._replaces_clip:
            return
        advantages = inputs["advantages"]
        inputs["advantages"] = shaped_objective(
            self._at_level(log_ratio, mask),
            advantages.unsqueeze(1) if advantages.dim() == 1 else advantages,
            self.shape,
            eps_low=self.epsilon_low,
            eps_high=self.epsilon_high,
            dual=self.args.dual,
        )
        # Not detached: the gradients through both then cancel, and the objective's own remains.
        inputs["old_per_token_logps"] = logps

    def _at_level(self, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The log-ratio of each token, or the mean over those of a sequence, ``(batch, 1)``."""
        if self.importance_sampling_level == "token":
            return log_ratio
        return ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)

    def _mode_metrics(self) -> dict[str, list[float]]:
        return self._metrics["train" if self.model.training else "eval"]

    def _report(self, log_ratio: torch.Tensor, logps: torch.Tensor, ref_logps: Any, mask: torch.Tensor) -> None:
        if self.importance_sampling_level == "token":
            of, seen = log_ratio, mask
        else:
            of, seen = self._at_level(log_ratio, mask), mask.any(dim=-1, keepdim=True)
        local = RatioSums.of(of, seen, eps_low=self.epsilon_low, eps_high=self.epsilon_high)
        sums = self.accelerator.reduce(local.sums, reduction="sum")
        metrics = RatioSums(sums, self.accelerator.gather(local.maximum)).metrics()
        if self._kl_in_reward:
            to_ref = ref_logps - logps
            kl = ((torch.exp(to_ref) - to_ref - 1.0) * mask).sum()
            total, count = self.accelerator.reduce(torch.stack([kl, mask.sum()]), reduction="sum").tolist()
            metrics["kl"] = total / max(count, 1.0)
        for name, value in metrics.items():
            self._mode_metrics()[name].append(value)

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        self._tool_mask = generated[2]
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
            # TRL leaves out completions that nothing could score; the divergence alone is no score.
            rewards[:, -1].masked_fill_(rewards[:, :-1].isnan().all(dim=1), torch.nan)
        return rewards

    def _kl_to_reference(self, **_: Any) -> list[float]:
        """``log pi_old - log pi_ref`` of each completion, summed over its own tokens."""
        reference = self._scored[-1]
        if len(self._scored) > 1:
            old_logps = self._scored[0].logps
        else:  # TRL needs none where each completion is used for one update
            with torch.no_grad():
                old_logps = self._get_per_token_logps_and_entropies(
                    self.model, *reference.arguments[1:], **reference.keywords
                )[0]
        _, _, attention_mask, length = reference.arguments
        mask = attention_mask[:, -length:].clone()
        for row, own in zip(mask, self._tool_mask or (), strict=False):
            row[: len(own)] *= torch.tensor(own, device=row.device)
        return ((old_logps - reference.logps) * mask).sum(-1).tolist()

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        return EpochSampler(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if not self.args.save_only_model:
            folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            save_rollout(self, folder)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_rollout(self, Path(checkpoint))


class GANOTrainer(ShapedGRPOTrainer):
    """The paper's GANO: ANO's shape in GRPO, with the KL divergence in the reward (:class:`GANOConfig`)."""

    config_class = GANOConfig
    _tag_names = ["trl", "grpo", "gano", "sb3-ano"]  # noqa: RUF012
    _name = "GANO"
