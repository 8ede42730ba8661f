"""GRPO with a shaping function: TRL's trainer with another objective of the ratio."""

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME
from trl import GRPOTrainer

from sb3_ano.llm.config import GANOConfig, ShapedGRPOConfig, ShapedPPOConfig, check, replaces_clip
from sb3_ano.llm.data import Prompt, check_arguments, check_columns
from sb3_ano.llm.resume import EpochSampler, load_rollout, load_weights, save_rollout
from sb3_ano.llm.rewards import LearnedReward, checked_function
from sb3_ano.llm.smollm import model_path
from sb3_ano.shaping import MAX_LOG_RATIO, ShapingLike, as_pair, name_of, require_trainable, surrogate

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig

#: A reward: a function, a model that scores, or the Hub id or directory of one.
Reward: TypeAlias = Callable[..., Any] | PreTrainedModel | str
#: What TRL makes of completions: tensors by name, and numbers.
Batch: TypeAlias = dict[str, Any]

# Arguments of all reward functions.
_ARGUMENTS = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
# Arguments that come from TRL, so that no column of the data can have their names; a column completion_ids is left out.
_RESERVED = (_ARGUMENTS - {"completion_ids"}) | {"environments", "self"}


class TrainerOptions(TypedDict, total=False):
    """Hold the arguments that TRL's ``GRPOTrainer`` gets as they are.

    :param reward_processing_classes: tokenizers of reward models
    :param callbacks: callbacks of transformers
    :param optimizers: optimizer and schedule, as in transformers
    :param quantization_config: quantization of the policy
    :param peft_config: adapter to train instead of the whole policy
    :param tools: functions that the policy may call, as in TRL
    :param rollout_func: function that generates completions, as in TRL
    :param environment_factory: environments of the policy, as in TRL
    """

    reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None
    callbacks: list[TrainerCallback] | None
    optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None]
    quantization_config: "BitsAndBytesConfig | None"
    peft_config: "PeftConfig | None"
    tools: list[Callable[..., object]] | None
    rollout_func: Callable[..., object] | None
    environment_factory: object


class ShapedGRPOTrainer(GRPOTrainer):
    """Train with TRL's ``GRPOTrainer``, with ``f`` and ``g`` of Definition 3.2 instead of the clip of the ratio.

    TRL computes the current log-probabilities before it reads the advantages and the log-probabilities at generation.
    In between, this class replaces the old log-probabilities by the current ones, so that TRL's own ratio is 1 and its clip
    does nothing, and the advantages by the shaped objective. Masks, loss types, evaluation, LoRA and vLLM stay TRL's. With
    PPO's shape nothing is replaced, because TRL's clip is that shape.

    It logs ``ratio/mean``, ``ratio/max``, ``ratio/outside_low``, ``ratio/outside_high`` and ``ratio/kl`` in addition to
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
    :param shaping: callable ``h(x)`` or anything else that :func:`sb3_ano.shaping.resolve` takes; ``args.shaping`` by default
    :param options: further arguments of TRL's trainer, by name, see :class:`~sb3_ano.llm.grpo.TrainerOptions`
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
    reward_func_names: list[str]
    reward_processing_classes: list[PreTrainedTokenizerBase | None]
    reward_weights: Tensor
    # Of the model card. It names the paper that introduced GRPO, which is not the one of these methods.
    _name = "GRPO with a shaping function"
    _tag_names = ["trl", "grpo", "sb3-ano"]  # noqa: RUF012
    _paper: dict[str, str] = {}  # noqa: RUF012

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Reward | Sequence[Reward] | None = None,
        args: ShapedGRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset] | dict[str, IterableDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        *,
        shaping: ShapingLike | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        # A copy, because another trainer may use the same settings with another shape. Pickles and copies lack secrets.
        given = self.config_class("trainer_output") if args is None else args
        args = copy.copy(given)
        args.__dict__.update(given.__dict__)

        # The settings of a critic have no effect without one, although their class is a subclass.
        has_critic = issubclass(self.config_class, ShapedPPOConfig)
        if not isinstance(args, self.config_class) or isinstance(args, ShapedPPOConfig) != has_critic:
            raise TypeError(f"args is a {type(args).__name__}; allowed are settings of class {self.config_class.__name__}")

        # The shape
        shaping = args.shaping if shaping is None else shaping
        if self.algorithm is not None and shaping not in (None, self.algorithm):
            raise ValueError(f"shaping={shaping!r} is not allowed: {type(self).__name__} has the shape {self.algorithm!r}")
        shaping = self.algorithm or shaping or "ano"
        self.shape = as_pair(shaping)
        require_trainable(self.shape)
        check(args, self.shape)
        args.shaping = str(name_of(shaping))  # for logs and checkpoints

        # The loss of a critic is a part of the objective that takes the place of the clip.
        self._replaces_clip = replaces_clip(self.shape) or has_critic
        self._kl_in_reward = args.kl_in == "reward" and args.beta != 0.0
        if args.use_bias_correction_kl is None:
            args.use_bias_correction_kl = not self._replaces_clip and not self._kl_in_reward

        # The batch of the loss that is being computed, and how often it has asked for log-probabilities
        self._loss_inputs: Batch | None = None
        self._calls = 0
        # Of the completions being scored: inputs of the forward passes, log-probabilities of each of them, tokens that the
        # policy wrote if others wrote some, and the KL divergence from the reference
        self._forward: tuple[Tensor, Tensor, int, dict[str, Any]]
        self._scored: list[Tensor] = []
        self._written: list[list[int]] | None = None
        self._kl: Tensor
        self._has_warned = False

        # TRL loads a model by its name.
        if isinstance(model, str):
            model = model_path(model)
        # A copy of the list, to which TRL adds.
        if isinstance(reward_funcs, list | tuple):
            reward_funcs = list(reward_funcs)
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            **options,
        )

        # Whatever would fail later, or train nothing
        self._check_data()
        self._check_reward_functions()
        self._require_trainable()
        if self._tokenizer.eos_token_id is None:
            name = self._tokenizer.name_or_path or "the model"
            raise ValueError(f"the tokenizer of {name!r} has no eos_token, without which no completion ends; set eos_token")

        # With a critic, the tokens pay for the KL divergence, not the completion.
        self._given_rewards = len(self.reward_funcs)
        if args.missing_eos_penalty:
            self._subtract(self._missing_eos, "missing_eos", args.missing_eos_penalty)
        if self._kl_in_reward and not has_critic:
            self._subtract(self._kl_of_completions, "kl", self.beta)

        passes = self.args.steps_per_generation * self.num_iterations
        if replaces_clip(self.shape) and self.args.gradient_accumulation_steps % passes == 0:
            warnings.warn(
                f"shaping={self.args.shaping!r} cannot act: each completion is used for one update only, so the ratio is 1; "
                "num_iterations=2 or more lets it act",
                stacklevel=2,
            )

        if args.disable_dropout:
            disable_dropout(self.model)
            if self.ref_model is not None:
                disable_dropout(self.ref_model)
        elif random_parts(self.model):
            warnings.warn("the policy has dropout, so that the ratio is not 1 before the first update", stacklevel=2)

    def _check_data(self) -> None:
        """Check prompts and columns, before anything is generated."""
        datasets = {"train_dataset": self.train_dataset}
        if isinstance(self.eval_dataset, dict):
            datasets |= self.eval_dataset
        else:
            datasets["eval_dataset"] = self.eval_dataset

        for name, dataset in datasets.items():
            columns = getattr(dataset, "column_names", None) or ()
            for column in _RESERVED.intersection(columns):
                raise ValueError(
                    f"{name} has a column {column!r}, which is the name of an argument that reward functions get from the "
                    f"trainer; rename it, as with {name}.rename_column({column!r}, 'my_{column}')"
                )

        # Environments have prompts of their own.
        if self.train_dataset is None or self.environments is not None:
            return
        check_columns(self.train_dataset, "train_dataset")

        # TRL leaves out a part of a generation, and would train nothing.
        needed = self.args.generation_batch_size // self.num_generations
        if not isinstance(self.train_dataset, IterableDataset) and len(self.train_dataset) < needed:
            raise ValueError(
                f"train_dataset has {len(self.train_dataset)} prompts; each generation needs {needed}, which a smaller "
                "per_device_train_batch_size or gradient_accumulation_steps reduces"
            )

    def _check_reward_functions(self) -> None:
        """Check what reward functions take, before anything is generated; and from now on, what they return."""
        columns = getattr(self.train_dataset, "column_names", None)
        can_check = columns is not None and self.environments is None

        # TRL passes the columns on, unless it removes them.
        passed_on = set(columns or ()) - {"prompt", "completion"}
        note = " (arguments of TRL, and columns of train_dataset)"
        if self.args.remove_unused_columns:
            passed_on.clear()
            note = ""

        functions = []
        for function, name in zip(self.reward_funcs, self.reward_func_names, strict=True):
            is_model = isinstance(function, nn.Module | LearnedReward)
            if not is_model and can_check:
                check_arguments(function, name, _ARGUMENTS | passed_on, note)
            if not is_model:
                function = checked_function(function, name, self.args.reward_timeout)
            functions.append(function)
        self.reward_funcs = functions

    def _require_trainable(self) -> None:
        """Require a parameter of the policy that an update can change."""
        trainable = set()
        for name, parameter in self.model.named_parameters():
            # TRL's copy of an adapter, the reference, is not trained.
            if parameter.requires_grad and ".ref." not in name:
                trainable.add(id(parameter))
        if not trainable:
            raise ValueError(
                "no parameter of the policy can be trained, because all are frozen; load an adapter with is_trainable=True, "
                "or give peft_config for a new one"
            )

        # A sharded model has other parameters than its optimizer.
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if self.optimizer is None or is_sharded:
            return
        if not trainable & optimized(self.optimizer):
            raise ValueError(
                "the optimizer has no parameter of the policy that can be trained; make it of the parameters of the model "
                "that the trainer gets"
            )

    def _subtract(
        self,
        function: Callable[..., list[float]],
        name: str,
        coefficient: float,
    ) -> None:
        """Subtract something from rewards as a reward function, so that weights, groups and logging stay TRL's."""
        if name in self.reward_func_names:
            raise ValueError(f"a reward function is called {name!r}, like one of this package; rename the function")
        self.reward_funcs = [*self.reward_funcs, function]
        self.reward_func_names = [*self.reward_func_names, name]
        self.reward_processing_classes = [*self.reward_processing_classes, None]
        weight = torch.tensor([-coefficient])
        self.reward_weights = torch.cat([self.reward_weights, weight])

    def _compute_loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        # A copy, because TRL reads the originals again in the next iteration.
        self._loss_inputs = dict(inputs)
        self._calls = 0

        # TRL adds beta * KL to the loss, and the reward may contain it already.
        beta = self.beta
        if self._kl_in_reward:
            self.beta = 0.0
        try:
            loss = super()._compute_loss(model, self._loss_inputs)
        finally:
            self._loss_inputs = None
            self.beta = beta

        if self._calls != 1:
            raise RuntimeError(
                f"the loss has asked for log-probabilities {self._calls} times, not once, so that the shape has not acted as "
                "it should; is this TRL's own loss?"
            )

        # TRL's clip has only seen a ratio of 1.
        if self._replaces_clip:
            metrics = self._mode_metrics()
            for name in list(metrics):
                if name.startswith("clip_ratio/"):
                    del metrics[name]
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        result = super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, **options)
        if self._loss_inputs is not None:
            self._calls += 1
            self._shape(self._loss_inputs, result[0])
        else:
            self._forward = (input_ids, attention_mask, logits_to_keep, options)
            self._scored.append(result[0])
        return result

    def _shape(self, inputs: Batch, logps: Tensor) -> None:
        """Replace the advantages by the shaped objective, and make TRL's own ratio 1.

        :param inputs: the batch that TRL's loss is about to read
        :param logps: current log-probabilities, ``(batch, tokens)``
        """
        mask = policy_mask(inputs)
        old_logps = inputs.get("old_per_token_logps")
        if old_logps is None:
            old_logps = logps.detach()

        # One ratio per token, or one per sequence
        log_ratio = logps - old_logps
        old_log_prob = old_logps
        counted = mask.bool()
        if self.importance_sampling_level == "sequence":
            lengths = mask.sum(-1, keepdim=True).clamp(min=1.0)
            log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / lengths
            old_log_prob = (old_logps * mask).sum(-1, keepdim=True) / lengths
            counted = counted.any(dim=-1, keepdim=True)
        self._log_ratio(log_ratio.detach(), counted)

        # As TRL logs it if it is in the loss
        if self._kl_in_reward:
            to_ref = (inputs["ref_per_token_logps"] - logps.detach()) * mask
            self._log_means(mask, {"kl": torch.expm1(to_ref) - to_ref})

        # Not detached: the gradients through both then cancel, and the objective's own gradient remains.
        if self._replaces_clip:
            inputs["advantages"] = self._objective(inputs, log_ratio, old_log_prob)
            inputs["old_per_token_logps"] = logps

    def _objective(self, inputs: Batch, log_ratio: Tensor, old_log_prob: Tensor) -> Tensor:
        """Return the objective to be maximized, ``(batch, tokens)``, or ``(batch, 1)`` if all tokens have the same.

        :param inputs: the batch of the loss
        :param log_ratio: ``(batch, tokens)``, or ``(batch, 1)`` for sequences
        :param old_log_prob: log-probabilities at generation, of the shape of ``log_ratio``
        """
        advantages = inputs["advantages"]
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        shape = torch.broadcast_shapes(log_ratio.shape, advantages.shape)
        return surrogate(
            log_ratio.expand(shape),
            advantages,
            self.shape,
            eps_low=self.epsilon_low,
            eps_high=self.epsilon_high,
            old_log_prob=old_log_prob.expand(shape),
        )

    def _mode_metrics(self) -> dict[str, list[float]]:
        return self._metrics["train" if self.model.training else "eval"]

    def _log_means(self, mask: Tensor, values: dict[str, Tensor]) -> None:
        """Log means over the elements that count, of all processes.

        :param mask: elements that count
        :param values: tensors of the shape of the mask, by name
        """
        sums = [mask.float().sum()]
        for tensor in values.values():
            sums.append((tensor.detach().float() * mask).sum())

        # One exchange between the processes for all of them
        totals = self.accelerator.reduce(torch.stack(sums), reduction="sum")
        count, *totals = totals.tolist()
        for name, total in zip(values, totals, strict=True):
            self._mode_metrics()[name].append(total / max(count, 1.0))

    def _log_ratio(self, log_ratio: Tensor, counted: Tensor) -> None:
        """Log statistics of the ratio, over all processes.

        :param log_ratio: ``(batch, tokens)``, or ``(batch, 1)`` for sequences
        :param counted: elements of ``log_ratio`` that count
        """
        # As in the surrogate; other elements count as a ratio of 1.
        log_ratio = torch.where(counted, log_ratio.float(), 0.0)
        log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
        deviation = torch.expm1(log_ratio)  # r - 1
        means = {
            "ratio/mean": deviation + 1.0,
            "ratio/outside_low": deviation < -self.epsilon_low,
            "ratio/outside_high": deviation > self.epsilon_high,
            "ratio/kl": deviation - log_ratio,
        }
        self._log_means(counted, means)

        ratio = torch.where(counted, deviation + 1.0, 0.0)
        maximum = self.accelerator.gather(ratio.max().reshape(1)).max()
        self._mode_metrics()["ratio/max"].append(maximum.item())

    def _generate(self, prompts: list[Prompt]) -> tuple[Any, ...]:
        generated = super()._generate(prompts)
        self._written = generated[2]
        # A rollout_func may have asked for log-probabilities of other texts.
        self._scored.clear()
        return generated

    def _calculate_rewards(self, *arguments: Any) -> Tensor:
        # Before the function that subtracts it is called
        if self._kl_in_reward:
            self._kl = self._kl_to_reference()
        self._scored.clear()
        rewards = super()._calculate_rewards(*arguments)

        # What this package subtracts is no score.
        scores = rewards[:, : self._given_rewards]
        infinite = scores.isinf()
        if infinite.any():
            row, column = infinite.nonzero()[0].tolist()
            returned = f"{self.reward_func_names[column]!r} returned {scores[row, column].item()} (in float32)"
            allowed = "allowed are finite numbers, and None for a completion without a score"
            raise ValueError(f"a reward is infinite; {allowed}; {returned}")
        self._warn_of_equal_rewards(scores)

        # TRL ignores completions that no reward function could score.
        unscored = scores.isnan().all(dim=1, keepdim=True)
        return rewards.masked_fill(unscored, torch.nan)

    def _warn_of_equal_rewards(self, scores: Tensor) -> None:
        """Warn once if all rewards of a comparison are equal, or missing, so that the advantages are zero."""
        if self._has_warned or not self.model.training:
            return

        # As TRL adds them up
        weights = self.reward_weights[: self._given_rewards].to(scores.device)
        totals = (scores * weights).nansum(dim=1)
        totals[scores.isnan().all(dim=1)] = torch.nan

        # Without groups, all completions of a generation are compared.
        has_groups = self.num_generations > 1
        groups = totals.view(1, -1)
        if has_groups:
            groups = totals.view(-1, self.num_generations)
        lowest = groups.nan_to_num(nan=torch.inf).amin(dim=1)
        highest = groups.nan_to_num(nan=-torch.inf).amax(dim=1)
        if (highest > lowest).any():
            return

        self._has_warned = True
        which = "of each group" if has_groups else "of a generation"
        warnings.warn(f"all rewards {which} are equal or missing, which teaches nothing; look at them", stacklevel=2)

    def _kl_of_completions(self, **_: object) -> list[float]:
        return self._kl.sum(-1).tolist()

    def _missing_eos(self, completion_ids: list[list[int]], **_: object) -> list[float]:
        # As TRL tells which completions are truncated
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        return [float(not ids or ids[-1] not in ends) for ids in completion_ids]

    def _kl_to_reference(self) -> Tensor:
        """Return ``log pi_old - log pi_ref`` of the completions being scored, 0 for tokens that the policy did not write."""
        # TRL computes the policy's log-probabilities first, unless it needs none, and those of the reference last.
        input_ids, attention_mask, length, options = self._forward
        ref_logps = self._scored[-1]
        if len(self._scored) > 1:
            old_logps = self._scored[0]
        else:
            with torch.no_grad():
                forward = super()._get_per_token_logps_and_entropies
                old_logps = forward(self.model, input_ids, attention_mask, length, **options)[0]

        # Without padding, and without results of tools
        mask = attention_mask[:, -length:].clone()
        if self._written is not None:
            for row, written in zip(mask, self._written, strict=True):
                row[: len(written)] *= torch.tensor(written, device=row.device)
        return (old_logps - ref_logps) * mask

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochSampler:
        sampler = super()._get_train_sampler(dataset)
        return EpochSampler(sampler, lambda: int(self.state.epoch or 0))

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        checkpoint = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self.save_critic(checkpoint / "critic")
        if not self.args.save_only_model:
            save_rollout(self, checkpoint)
        # Last, because it ends with the state that makes a checkpoint complete.
        super()._save_checkpoint(model, trial)

    def save_critic(self, directory: str | Path) -> None:
        """Save the critic, if there is one."""

    def _load_critic(self, directory: Path) -> None:
        """Load the critic, if there is one."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._load_whole(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        checkpoint = Path(str(self.state.best_model_checkpoint))
        if not self._load_whole(checkpoint):
            super()._load_best_model()
        self._load_critic(checkpoint / "critic")

    def _load_whole(self, checkpoint: Path) -> bool:
        """Load the parameters of a checkpoint, unless it holds adapters or shards, which are transformers' own matter."""
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        is_whole = isinstance(self.model, PreTrainedModel) and (checkpoint / CONFIG_NAME).is_file()
        if is_sharded or not is_whole:
            return False
        load_weights(self.model, checkpoint)
        return True

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_rollout(self, Path(checkpoint))
            self._load_critic(Path(checkpoint, "critic"))


class GANOTrainer(ShapedGRPOTrainer):
    """Train with GANO: GRPO with ANO's shape and the KL divergence in the reward (:class:`GANOConfig`)."""

    config_class = GANOConfig

    _name = "GANO"
    _tag_names = ["trl", "grpo", "gano", "sb3-ano"]  # noqa: RUF012


def policy_mask(batch: Batch) -> Tensor:
    """Return which tokens of the completions the policy wrote, ``(batch, tokens)``; results of tools are not its own."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def random_parts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the probabilities and scales that make the forward passes of a training random.

    Besides the layers of PyTorch, models of transformers have some as attributes (OPT, Bloom, LLaMA).

    :param model: model of transformers or PEFT
    :return: modules, and names of their attributes
    """
    # No list of names is complete: attention_dropout, layerdrop, resid_pdrop, router_jitter_noise.
    parts = []
    for module in model.modules():
        for name, value in vars(module).items():
            is_named = "drop" in name or "jitter" in name
            is_p = name == "p" and isinstance(module, nn.Dropout)
            # A bool is no probability.
            is_number = type(value) in (int, float)
            if (is_named or is_p) and is_number and value > 0:
                parts.append((module, name))
    return parts


def disable_dropout(model: nn.Module) -> None:
    """Turn dropout off. The configuration, which is saved with the model, stays as it is.

    :param model: model of transformers or PEFT
    """
    for module, name in random_parts(model):
        setattr(module, name, 0.0)


def optimized(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the parameters of an optimizer."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
