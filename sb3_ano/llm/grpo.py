"""GRPO with a shaping function: TRL's trainer with another objective of the ratio."""

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from datasets import IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME
from trl import GRPOTrainer

from sb3_ano.llm.config import GANOConfig, ShapedGRPOConfig, ShapedPPOConfig, check
from sb3_ano.llm.data import check_arguments, check_columns
from sb3_ano.llm.dropout import disable_dropout, random_parts, restored
from sb3_ano.llm.resume import EpochSampler, load_rollout, load_weights, save_rollout
from sb3_ano.llm.rewards import LearnedReward, checked_function
from sb3_ano.shaping import MAX_LOG_RATIO, ShapingLike, ano, as_pair, measure, name_of, ppo, surrogate

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig

#: A reward: a function, a model that scores, or the Hub id or directory of one.
Reward: TypeAlias = Callable[..., Any] | PreTrainedModel | str
# Arguments of reward functions that come from TRL, so that no column of the data can have their names.
_FROM_TRAINER = ("prompts", "completions", "trainer_state", "log_extra", "log_metric", "environments", "self")


class ShapedGRPOTrainer(GRPOTrainer):
    """Train with TRL's ``GRPOTrainer``, with ``f`` and ``g`` of Definition 3.2 instead of the clip of the ratio.

    TRL computes the current log-probabilities before it reads the advantages and the log-probabilities at generation.
    In between, this class replaces the old log-probabilities by the current ones, so that TRL's own ratio is 1 and its clip
    does nothing, and the advantages by the shaped objective. Masks, loss types, evaluation, LoRA and vLLM stay TRL's. With
    PPO's shape nothing is replaced, because TRL's clip is that shape.

    It logs ``ratio/mean``, ``ratio/max``, ``ratio/outside_low``, ``ratio/outside_high`` and ``approx_kl`` in addition to
    TRL's metrics, at the level of ``importance_sampling_level``; in evaluations the ratio is 1. With ``kl_in="reward"``,
    ``rewards/kl/mean`` is the sum over a completion, and ``kl`` is what TRL logs with the KL divergence in the loss.
    ``rewards/missing_eos/mean`` is the fraction of completions without EOS, if they are penalized. Checkpoints also contain
    the completions in use, so that a training can resume from any of them.

    :param model: model, or its Hub id or directory
    :param reward_funcs: reward models and functions, as in TRL
    :param args: settings; by default those of the trainer's own class of settings
    :param train_dataset: data with a column ``prompt``; its other columns are arguments of the reward functions
    :param eval_dataset: data of evaluations, or several by name
    :param processing_class: tokenizer of the policy; that of the model by default
    :param reward_processing_classes: tokenizers of reward models
    :param callbacks: callbacks of transformers
    :param optimizers: optimizer and schedule, as in transformers
    :param quantization_config: quantization of the policy
    :param peft_config: adapter to train instead of the whole policy
    :param tools: functions that the policy may call, as in TRL
    :param rollout_func: function that generates completions, as in TRL
    :param environment_factory: environments of the policy, as in TRL
    :param shaping: callable ``h(x)`` or anything else that :func:`sb3_ano.shaping.resolve` takes; ``args.shaping`` by default
    :raises ValueError: if the tokenizer has no EOS token, the data set has no prompts, a setting or the shape is invalid, a
        reward function does not take its arguments, or no parameter of the policy can be trained
    :raises TypeError: if ``args`` are settings of another trainer
    """

    config_class: type[ShapedGRPOConfig] = ShapedGRPOConfig
    #: Name of the shape of the algorithm; None: the settings have it.
    algorithm: str | None = None
    args: ShapedGRPOConfig
    beta: float
    reward_funcs: list[Any]
    reward_weights: torch.Tensor
    _tag_names = ["trl", "grpo", "sb3-ano"]  # noqa: RUF012

    def __init__(
        self,
        model: str | torch.nn.Module,
        reward_funcs: Reward | Sequence[Reward] | None = None,
        args: ShapedGRPOConfig | None = None,
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
    ) -> None:
        # A copy, because another trainer may use the same settings with another shape.
        given = self.config_class("trainer_output") if args is None else args
        args = copy.copy(given)
        args.__dict__.update(given.__dict__)  # of which pickles and copies lack secrets
        has_critic = issubclass(self.config_class, ShapedPPOConfig)
        if not isinstance(args, self.config_class) or isinstance(args, ShapedPPOConfig) != has_critic:
            raise TypeError(f"args is a {type(args).__name__}; allowed are settings of class {self.config_class.__name__}")
        shaping = args.shaping if shaping is None else shaping
        if self.algorithm is not None and shaping not in (None, self.algorithm):
            raise ValueError(f"shaping={shaping!r} is not allowed: {type(self).__name__} has the shape {self.algorithm!r}")
        shaping = self.algorithm or shaping or "ano"
        args.shaping = str(name_of(shaping))  # for logs and checkpoints
        self.shape = as_pair(shaping)
        for shape in self.shape:
            measure(shape).require_trainable()
        check(args, self.shape)
        self._replaces_clip = not (self.shape.f is self.shape.g is ppo)
        self._kl_in_reward = args.kl_in == "reward" and args.beta != 0.0
        if args.use_bias_correction_kl is None:
            args.use_bias_correction_kl = not self._replaces_clip and not self._kl_in_reward
        self._name = self._method(args)
        self._paper = GRPOTrainer._paper if self._name == "GRPO" else {}  # which the model card says that it introduced
        self._loss_inputs: dict[str, Any] | None = None
        self._calls = 0  # of the hook, in the current loss
        # Arguments, keyword arguments and log-probabilities of each forward pass over the completions being scored.
        self._scored: list[tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]] = []
        self._tool_mask: list[list[int]] | None = None
        self._has_warned = False
        super().__init__(
            model,
            list(reward_funcs) if isinstance(reward_funcs, list | tuple) else reward_funcs,
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
        )
        if self.train_dataset is not None and environment_factory is None:
            check_columns(self.train_dataset, "train_dataset")
            self._require_prompts(self.train_dataset)
        self._check_reward_functions()
        self._require_trainable()
        if self._tokenizer.eos_token_id is None:
            name = self._tokenizer.name_or_path or "the model"
            raise ValueError(f"the tokenizer of {name!r} has no eos_token, without which no completion ends; set eos_token")
        self._given_rewards = len(self.reward_funcs)
        if args.missing_eos_penalty:
            self._add_reward(self._missing_eos, "missing_eos", args.missing_eos_penalty)
        if self._kl_in_reward and not has_critic:  # whose tokens pay for it
            self._add_reward(lambda **_: self._kl_to_reference().sum(-1).tolist(), "kl", self.beta)
        self._warn_where_the_ratio_stays_1()
        #: Probabilities in configurations that are saved as they were.
        self._dropout: list[tuple[Any, str, float]] = []
        if args.disable_dropout:
            self._dropout += disable_dropout(self.model)
            if self.ref_model is not None:
                self._dropout += disable_dropout(self.ref_model)
        elif random_parts(self.model):
            warnings.warn("the policy has dropout, so that the ratio is not 1 before the first update", stacklevel=2)

    def _check_reward_functions(self) -> None:
        """Check what reward functions take, before anything is generated; and from now on, what they return."""
        datasets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval_dataset": self.eval_dataset}
        datasets = {"train_dataset": self.train_dataset, **datasets}
        for name, dataset in datasets.items():
            for column in set(getattr(dataset, "column_names", None) or ()).intersection(_FROM_TRAINER):
                raise ValueError(
                    f"{name} has a column {column!r}, which is the name of an argument that reward functions get from the "
                    f"trainer; rename it, as with {name}.rename_column({column!r}, 'my_{column}')"
                )
        columns = getattr(self.train_dataset, "column_names", None)
        functions = []
        for function, name in zip(self.reward_funcs, self.reward_func_names, strict=True):
            if not isinstance(function, torch.nn.Module | LearnedReward):
                if columns is not None and self.environments is None:
                    kept = () if self.args.remove_unused_columns else set(columns) - {"prompt", "completion"}
                    given = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", *kept}
                    check_arguments(
                        function, name, given, ", of which the last ones are columns of train_dataset" if kept else ""
                    )
                function = checked_function(function, name, self.args.reward_timeout)
            functions.append(function)
        self.reward_funcs = functions

    def _require_trainable(self) -> None:
        """Require a parameter of the policy that an update can change."""
        # TRL's copy of an adapter, the reference, is not trained.
        trainable = {
            id(parameter)
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and ".ref." not in name
        }
        if not trainable:
            raise ValueError(
                "no parameter of the policy can be trained, because all are frozen; load an adapter with is_trainable=True, "
                "or give peft_config for a new one"
            )
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if self.optimizer is None or is_sharded:
            return
        optimized = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        if not optimized & trainable:
            raise ValueError(
                "the optimizer has no parameter of the policy that can be trained; make it of the parameters of the model "
                "that the trainer gets"
            )

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimizer, which has to have a parameter of the policy."""
        optimizer = super().create_optimizer(model)
        self._require_trainable()
        return optimizer

    def _save(self, *arguments: Any, **keywords: Any) -> None:
        with restored(self._dropout):
            super()._save(*arguments, **keywords)

    def _require_prompts(self, dataset: Any) -> None:
        """Require enough prompts for one generation; TRL leaves out a part of one, and would train nothing."""
        needed = self.args.generation_batch_size // self.num_generations
        if not isinstance(dataset, IterableDataset) and len(dataset) < needed:
            raise ValueError(
                f"train_dataset has {len(dataset)} prompts; each generation needs {needed}, which a smaller "
                "per_device_train_batch_size or gradient_accumulation_steps reduces"
            )

    def _method(self, args: ShapedGRPOConfig) -> str:
        """Return the name of the method, for the model card."""
        shape = f" with shaping={args.shaping!r}" if self._replaces_clip else ""
        return f"GRPO{shape}{', KL divergence in the reward' if self._kl_in_reward else ''}"

    def _add_reward(self, function: Any, name: str, penalty: float) -> None:
        """Add something to subtract as a reward function, so that weights, gathering, groups and logging stay TRL's."""
        if name in self.reward_func_names:
            raise ValueError(f"a reward function is called {name!r}, like one of this package; rename the function")
        for attribute, value in (("reward_funcs", function), ("reward_func_names", name), ("reward_processing_classes", None)):
            setattr(self, attribute, [*getattr(self, attribute), value])
        self.reward_weights = torch.cat([self.reward_weights, torch.tensor([-penalty])])

    def _warn_where_the_ratio_stays_1(self) -> None:
        passes = self.args.steps_per_generation * self.num_iterations
        if self._replaces_clip and self.args.gradient_accumulation_steps % passes == 0:
            warnings.warn(
                f"shaping={self.args.shaping!r} cannot act: each completion is used for one update only, so the ratio is 1; "
                "num_iterations=2 or more lets it act",
                stacklevel=3,
            )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        # A copy, because TRL reads the originals again in the next iteration.
        self._loss_inputs, self._calls = dict(inputs), 0
        beta, self.beta = self.beta, 0.0 if self._kl_in_reward else self.beta  # TRL adds beta * KL to the loss
        try:
            loss = super()._compute_loss(model, self._loss_inputs)
        finally:
            self._loss_inputs, self.beta = None, beta
        if self._calls != 1:
            raise RuntimeError(
                f"the loss has asked for log-probabilities {self._calls} times, not once, so that the shape has not acted as "
                "it should; is this TRL's own loss?"
            )
        if self._replaces_clip:
            for name in [name for name in self._mode_metrics() if name.startswith("clip_ratio/")]:
                del self._mode_metrics()[name]  # TRL's clip has only seen a ratio of 1
        return loss

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*arguments, **keywords)
        if self._loss_inputs is not None:
            self._calls += 1
            self._shape(self._loss_inputs, result[0])
        else:
            self._scored.append((arguments, keywords, result[0]))
        return result

    def _shape(self, inputs: dict[str, Any], logps: torch.Tensor) -> None:
        """Replace the advantages by the shaped objective, and make TRL's own ratio 1.

        :param inputs: the batch that TRL's loss is about to read
        :param logps: current log-probabilities, ``(batch, tokens)``
        """
        mask = policy_mask(inputs)
        old_logps = inputs.get("old_per_token_logps")
        log_ratio = logps - (logps.detach() if old_logps is None else old_logps)
        seen = mask
        if self.importance_sampling_level == "sequence":
            log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
            seen = mask.any(dim=-1, keepdim=True)
        to_ref = inputs["ref_per_token_logps"] - logps.detach() if self._kl_in_reward else torch.zeros_like(logps)
        self._log(log_ratio.detach(), seen.bool(), to_ref * mask, mask)
        if not self._replaces_clip:
            return
        advantages = inputs["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        log_ratio = log_ratio.expand(torch.broadcast_shapes(log_ratio.shape, advantages.shape))
        radii = {"eps_low": self.epsilon_low, "eps_high": self.epsilon_high}
        inputs["advantages"] = surrogate(log_ratio, advantages, self.shape, **radii)
        # Not detached: the gradients through both then cancel, and the objective's own gradient remains.
        inputs["old_per_token_logps"] = logps

    def _mode_metrics(self) -> dict[str, list[float]]:
        return self._metrics["train" if self.model.training else "eval"]

    def _log_means(self, mask: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        """Log means over the elements that count, of all processes.

        :param mask: elements that count
        :param values: tensors of the shape of the mask, by name
        """
        sums = torch.stack([(tensor.detach().float() * mask).sum() for tensor in (torch.ones_like(mask), *values.values())])
        count, *totals = self.accelerator.reduce(sums, reduction="sum").tolist()
        for name, total in zip(values, totals, strict=True):
            self._mode_metrics()[name].append(total / max(count, 1.0))

    def _log(self, log_ratio: torch.Tensor, seen: torch.Tensor, to_ref: torch.Tensor, mask: torch.Tensor) -> None:
        """Log statistics of the ratio, and the KL divergence as TRL does if it is in the loss, over all processes.

        :param log_ratio: ``(batch, tokens)``, or ``(batch, 1)`` for sequences
        :param seen: elements of ``log_ratio`` that count
        :param to_ref: ``log pi_ref - log pi``, ``(batch, tokens)``, 0 for tokens that do not count
        :param mask: tokens that count
        """
        log_ratio = torch.where(seen, log_ratio.float(), 0.0).clamp(max=MAX_LOG_RATIO)
        deviation = torch.expm1(log_ratio)  # r - 1, zero where it does not count
        outside = {"ratio/outside_low": deviation < -self.epsilon_low, "ratio/outside_high": deviation > self.epsilon_high}
        self._log_means(seen, {"ratio/mean": deviation + 1.0, **outside, "approx_kl": deviation - log_ratio})
        if self._kl_in_reward:
            self._log_means(mask, {"kl": torch.expm1(to_ref) - to_ref})
        maximum = torch.where(seen, deviation + 1.0, 0.0).max().reshape(1)
        self._mode_metrics()["ratio/max"].append(self.accelerator.gather(maximum).max().item())

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        _, _, self._tool_mask, *_ = generated
        self._scored.clear()  # a rollout_func may have asked for log-probabilities
        return generated

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        self._scored.clear()
        return batch

    def _calculate_rewards(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*arguments, **keywords)
        scores = rewards[:, : self._given_rewards]
        for name, column in zip(self.reward_func_names, scores.T, strict=False):
            if column.isinf().any():
                value = column[column.isinf()][0].item()
                allowed = "allowed are finite numbers, and None for a completion without a score"
                raise ValueError(f"a reward is infinite; {allowed}; {name!r} returned {value} (in float32)")
        self._warn_of_equal_rewards(scores)
        # TRL ignores completions that no reward function could score; what this package adds is not a score.
        unscored = scores.isnan().all(dim=1, keepdim=True)
        return rewards.masked_fill(unscored, torch.nan)

    def _warn_of_equal_rewards(self, scores: torch.Tensor) -> None:
        """Warn once if a generation teaches nothing, because all rewards that are compared are equal, or there are none."""
        if self._has_warned or not self.model.training:
            return
        weights = self.reward_weights[: self._given_rewards].to(scores.device)
        totals = (scores * weights).nansum(dim=1).masked_fill(scores.isnan().all(dim=1), torch.nan)
        groups = totals.view(-1, self.num_generations) if self.num_generations > 1 else totals.view(1, -1)
        lowest = groups.nan_to_num(nan=torch.inf).amin(dim=1)
        highest = groups.nan_to_num(nan=-torch.inf).amax(dim=1)
        if (highest <= lowest).all():
            self._has_warned = True
            which = "of each group" if self.num_generations > 1 else "of a generation"
            warnings.warn(f"all rewards {which} are equal or missing, which teaches nothing; look at them", stacklevel=2)

    def _missing_eos(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}  # as TRL tells which completions are truncated
        return [float(not ids or ids[-1] not in ends) for ids in completion_ids]

    def _kl_to_reference(self) -> torch.Tensor:
        """Return ``log pi_old - log pi_ref`` of the completions being scored, 0 for tokens that the policy did not write."""
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
        return (old_logps - ref_logps) * mask

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        return EpochSampler(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._load_whole(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._load_whole(Path(str(self.state.best_model_checkpoint))):
            super()._load_best_model()

    def _load_whole(self, checkpoint: Path) -> bool:
        """Load the parameters of a checkpoint, unless it holds adapters or shards, which are transformers' own matter."""
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        is_whole = isinstance(self.model, PreTrainedModel) and not is_sharded and (checkpoint / CONFIG_NAME).is_file()
        if is_whole:
            load_weights(self.model, checkpoint)
        return is_whole

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        checkpoint = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self.save_critic(checkpoint / "critic")
        if not self.args.save_only_model:
            save_rollout(self, checkpoint)
        super()._save_checkpoint(model, trial)  # which ends with the state that makes a checkpoint complete

    def save_critic(self, directory: str | Path) -> None:
        """Save the critic, if there is one."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_rollout(self, Path(checkpoint))


class GANOTrainer(ShapedGRPOTrainer):
    """Train with GANO: GRPO with ANO's shape and the KL divergence in the reward (:class:`GANOConfig`)."""

    config_class = GANOConfig

    def _method(self, args: ShapedGRPOConfig) -> str:
        if not (self.shape.f is self.shape.g is ano and self._kl_in_reward):  # the settings allow others
            return super()._method(args)
        self._tag_names = [*self._tag_names, "gano"]
        return "GANO"


def policy_mask(batch: dict[str, Any]) -> torch.Tensor:
    """Return which tokens of the completions the policy wrote, ``(batch, tokens)``; results of tools are not its own."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask
