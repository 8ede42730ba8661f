"""The state of the engine between the updates of a model, and one update."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano._system import warn_user
from sb3_ano.fast.act import Actor, make_actor
from sb3_ano.fast.buffer import DeviceBuffer
from sb3_ano.fast.compiled import CompilationError, CompiledStep, FlatVectors, compiler_options, make_step
from sb3_ano.fast.device import DeviceRollout, Replayed, make_rollout
from sb3_ano.fast.policy import PolicyEvaluation, RecurrentEvaluation, is_recurrent
from sb3_ano.fast.private import compiler_obstacle, tracing
from sb3_ano.fast.rules import Decisions, Options, decide, device_of
from sb3_ano.fast.step import (
    EagerStep,
    Numbers,
    PolicyLoss,
    Settings,
    StepResult,
    StepSummary,
    UpdateStatistics,
    rollout_tensors,
    summarize,
    trained_parameters,
    without_padding,
)


def make_evaluation(policy: ActorCriticPolicy, precision: str, decisions: Decisions) -> PolicyEvaluation:
    """Make the evaluation of a policy; see :class:`~sb3_ano.fast.policy.PolicyEvaluation`."""
    kind = RecurrentEvaluation if is_recurrent(policy) else PolicyEvaluation
    return kind(policy, precision, decisions.policy is not None, decisions.channels_last)


class Engine:
    """Keep decisions and compiled code of one model. It is never saved; a copy of a model gets a new one."""

    def __init__(self) -> None:
        #: Decisions for the rollout that was collected last; None if they have to be made again.
        self.decisions: Decisions | None = None
        #: Whether the user was told about masks that allow no action in this training.
        self.warned_of_masks = False
        # Evaluation of the policy for the next update.
        self._evaluation: PolicyEvaluation | None = None
        self._compiled: _CompiledUpdate | None = None
        self._device_rollout: DeviceRollout | None = None
        #: Reason for which compilation was given up.
        self.obstacle: str | None = None
        self._is_warned = False

    def __reduce__(self) -> Any:
        return Engine, ()

    def forget(self) -> None:
        """Drop compiled code and decisions, because the model has changed in a way that no rule sees."""
        self.decisions = None
        self._evaluation = None
        self._compiled = None
        self._device_rollout = None
        self.obstacle = None

    def decide(self, model: "Accelerated", options: Options) -> tuple[Decisions, PolicyEvaluation]:
        """Decide about the next rollout and its update.

        :param model: on-policy algorithm
        :param options: settings of the engine
        :return: the decisions, and the evaluation of the policy for the update
        """
        self.decisions = decide(model, options)
        self._evaluation = make_evaluation(model.policy, options.precision, self.decisions)
        return self.decisions, self._evaluation

    def make_actor(self, model: "Accelerated", options: Options) -> Actor:
        """Return the policy of the rollout, as it was decided."""
        decisions = self.decisions
        if decisions is None:
            decisions, _ = self.decide(model, options)
        return make_actor(model, make_evaluation(model.policy, options.precision, decisions), decisions)

    def update(
        self,
        model: "Accelerated",
        policy_loss: PolicyLoss,
        numbers: Numbers,
        *,
        is_known_loss: Callable[[], bool] = lambda: True,
        loss_constants: tuple[float, ...] = (),
        skips_non_finite: bool = True,
        with_td_errors: bool = False,
    ) -> "Update":
        """Prepare an update on the rollout of a model.

        :param model: accelerated on-policy algorithm
        :param policy_loss: surrogate of the algorithm, a function of tensors
        :param numbers: numbers of the update, floats
        :param is_known_loss: function that tells whether the surrogate is this package's code, with a shape of this package
        :param loss_constants: further numbers that the surrogate reads
        :param skips_non_finite: whether a minibatch whose loss or gradient is NaN or Inf changes nothing
        :param with_td_errors: whether the surrogate reads ``samples.td_errors``
        """
        options = model.engine_options()
        decisions = self.decisions
        evaluation = self._evaluation
        if decisions is None or evaluation is None:
            decisions, evaluation = self.decide(model, options)
        # A callback may change the model before the next update.
        self.decisions = None
        settings = Settings(
            policy_loss=policy_loss,
            clip_value=model.clip_range_vf is not None,
            normalize_advantage=model.normalize_advantage,
            is_discrete=isinstance(model.action_space, spaces.Discrete),
            skips_non_finite=skips_non_finite,
        )
        compiled = None
        if decisions.compilation is None and self.obstacle is None:
            compiled = self._compiled_update(
                model,
                evaluation,
                settings,
                decisions,
                options,
                is_known_loss(),
                loss_constants,
            )
        if decisions.changeable:
            reasons = "; ".join(decisions.changeable)
            self._warn(f"this training leaves the fast path: {reasons}. print(explain(model)) shows what runs instead")

        buffer = model.rollout_buffer
        rollout = None
        if isinstance(buffer, DeviceBuffer) and buffer.held:
            rollout = buffer.samples(with_td_errors)
        elif decisions.rollout is None:
            rollout = rollout_tensors(buffer, decisions.channels_last, with_td_errors)
        return Update(
            self,
            model,
            evaluation,
            settings,
            numbers,
            decisions,
            rollout,
            compiled,
        )

    def collect_on_device(
        self,
        model: "Accelerated",
        env: VecEnv,
        callback: BaseCallback,
        check: Any,
        n_steps: int,
        use_masking: bool,
    ) -> bool:
        """Collect a rollout as tensors on the device, and hand it to the buffer; see :class:`DeviceRollout`.

        :return: False if a callback ended the training
        """
        decisions = self.decisions
        evaluation = self._evaluation
        if decisions is None or evaluation is None:
            decisions, evaluation = self.decide(model, model.engine_options())
        if self._device_rollout is None or not self._device_rollout.fits(env, n_steps):
            self._device_rollout = make_rollout(model, env, n_steps)
        return self._device_rollout.collect(
            callback,
            check,
            evaluation,
            decisions,
            use_masking,
        )

    def _compiled_update(
        self,
        model: "Accelerated",
        evaluation: PolicyEvaluation,
        settings: Settings,
        decisions: Decisions,
        options: Options,
        has_known_loss: bool,
        loss_constants: tuple[float, ...],
    ) -> "_CompiledUpdate | None":
        """Return compiled code that fits the model, that of the last update if possible; None if there can be none."""
        made_for = (
            [id(model.policy), id(model.policy.optimizer), *map(id, trained_parameters(model.policy.optimizer))],
            (settings, options.precision, has_known_loss, loss_constants),
            (decisions.library_code, decisions.channels_last),
            (model.policy.normalize_images, model.policy.observation_space),
        )
        if self._compiled is not None and self._compiled.made_for == made_for:
            return self._compiled

        reason = compiler_obstacle(compiler_options(model.policy.device, 1, decisions.library_code))
        if reason is not None:
            self.give_up_compiling(reason)
            return None
        if model.verbose >= 1:
            print("Compiling the update, which takes about 10 s the first time")
        known_code = decisions.library_code and has_known_loss and not model.policy.squash_output
        self._compiled = _CompiledUpdate(
            evaluation,
            settings,
            decisions.library_code,
            known_code,
            made_for,
        )
        return self._compiled

    def give_up_compiling(self, reason: str) -> None:
        """Train without compiled code from now on, and tell the user once."""
        self._compiled = None
        self.obstacle = reason
        self._warn(f"torch_compile: the update cannot be compiled and runs without ({reason})")

    def _warn(self, message: str) -> None:
        """Warn once per model."""
        if not self._is_warned:
            self._is_warned = True
            warn_user(message)


class _CompiledUpdate:
    """The compiled steps of a model, by length of the minibatch, and the vectors that they change.

    :param evaluation: evaluation of the policy
    :param settings: properties of the algorithm
    :param library_code: whether all modules of the policy are PyTorch's and SB3's
    :param known_code: whether the surrogate is known, too, and actions are not squashed
    :param made_for: what the code depends on
    """

    def __init__(
        self,
        evaluation: PolicyEvaluation,
        settings: Settings,
        library_code: bool,
        known_code: bool,
        made_for: Any,
    ) -> None:
        policy = evaluation.policy
        self.made_for = made_for
        self.flat = FlatVectors(policy.optimizer)
        self._policy = policy
        self._step = make_step(self.flat, evaluation, settings, uses_all=library_code)
        self._n_parameters = sum(parameter.numel() for parameter in policy.parameters())
        self._library_code = library_code
        self._known_code = known_code
        self._steps: dict[tuple[int, bool], CompiledStep] = {}
        # Code that is not known may wait for the device, and may change from call to call. A recorded graph does not notice.
        self._is_recordable = policy.device.type == "cuda" and known_code
        # By length of the minibatch and place of the rollout: the indices and numbers that a graph reads, and the graph.
        self._replayed: dict[tuple[int, int], tuple[torch.Tensor, Numbers, Replayed]] = {}

    def start_epoch(self) -> None:
        """Check again what compiled code depends on."""
        for step in self._steps.values():
            step.start_epoch()

    def step(
        self,
        rollout: Any,
        indices: torch.Tensor | None,
        numbers: Numbers,
    ) -> StepResult:
        """Make one step; see :class:`~sb3_ano.fast.compiled.CompiledStep`."""
        length = len(rollout.advantages if indices is None else indices)
        variant = (length, indices is None)
        if variant not in self._steps:
            options = compiler_options(self._policy.device, length * self._n_parameters, self._known_code)
            # Custom modules may change at every call, and minibatches of a custom buffer may differ in their types.
            self._steps[variant] = CompiledStep(self._step, options, self._library_code and indices is not None)
        return self._steps[variant](self.flat.vectors, rollout, indices, numbers)

    def summarized_step(
        self,
        rollout: Any,
        indices: torch.Tensor,
        numbers: Numbers,
    ) -> StepSummary:
        """Make one step on a rollout whose tensors stay in their places; on CUDA, it is recorded as a graph and replayed."""
        if not self._is_recordable:
            return summarize(self.step(rollout, indices, numbers), numbers)

        key = (len(indices), rollout.advantages.data_ptr())
        if key not in self._replayed:
            places = indices.clone()
            values = Numbers(*[number.clone() for number in numbers])
            function = functools.partial(self._step_and_summary, rollout, places, values)
            self._replayed[key] = (places, values, Replayed(function, self._policy.device))
        places, values, replayed = self._replayed[key]
        places.copy_(indices)
        for value, number in zip(values, numbers, strict=True):
            value.copy_(number)
        summary = replayed()
        # The next replay overwrites it.
        return StepSummary(summary.numbers.clone(), summary.log_ratio, summary.stop)

    def _step_and_summary(
        self,
        rollout: Any,
        indices: torch.Tensor,
        numbers: Numbers,
    ) -> StepSummary:
        return summarize(self.step(rollout, indices, numbers), numbers)


class Update:
    """One update, a context: what a user holds is plain before and after it.

    :param engine: engine of the model
    :param model: on-policy algorithm
    :param evaluation: evaluation of its policy
    :param settings: properties of the algorithm
    :param numbers: numbers of the update, floats
    :param decisions: decisions for the update
    :param rollout: the whole rollout as tensors, or None if its buffer makes the minibatches
    :param compiled: compiled steps, or None
    """

    def __init__(
        self,
        engine: Engine,
        model: "Accelerated",
        evaluation: PolicyEvaluation,
        settings: Settings,
        numbers: Numbers,
        decisions: Decisions,
        rollout: Any,
        compiled: _CompiledUpdate | None,
    ) -> None:
        policy = model.policy
        self.statistics = UpdateStatistics(numbers)
        self._engine = engine
        self._buffer = model.rollout_buffer
        self._batch_size = model.batch_size
        self._rollout = rollout
        self._compiled = compiled
        # Then the results of minibatches are not read before the end of the update.
        self._is_on_device = isinstance(self._buffer, DeviceBuffer) and bool(self._buffer.held)
        # The order of SB3 is drawn on the host, for environments that are there, too.
        self._draws_on_device = self._is_on_device and device_of(model.env) is not None and policy.device.type == "cuda"
        self._numbers = Numbers(*torch.tensor(numbers, dtype=torch.float32, device=policy.device).unbind())
        is_fused = decisions.update is None and policy.device.type == "cpu"
        self._eager = EagerStep(policy, evaluation, settings, self._numbers, is_fused)
        self._context = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._compiled is not None:
            self._context.callback(self._compiled.flat.detach)
            self._compiled.flat.attach()
            self._context.enter_context(tracing())
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.close()

    def epoch(self) -> Iterator[tuple[Any, torch.Tensor | None]]:
        """Iterate over the minibatches of one epoch, in random order.

        :return: the whole rollout and the indices of a minibatch; or, if the buffer makes minibatches, one of those and None
        """
        self.statistics.epoch_start = len(self.statistics)
        if self._compiled is not None:
            self._compiled.start_epoch()

        rollout = self._rollout
        if rollout is not None:
            n_samples = len(rollout.advantages)
            if self._draws_on_device:
                order = torch.randperm(n_samples, device=rollout.advantages.device)
            else:
                order = torch.from_numpy(np.random.permutation(n_samples)).to(rollout.advantages.device)
            for indices in order.split(int(self._batch_size)):
                yield rollout, indices
            return

        for samples in self._buffer.get(self._batch_size):
            if hasattr(samples, "lstm_states"):
                yield without_padding(samples), None
            else:
                yield samples, None

    def step(self, rollout: Any, indices: torch.Tensor | None) -> StepResult | StepSummary:
        """Make one step on a minibatch of :meth:`epoch`, and record it."""
        result: StepResult | StepSummary | None = None
        if self._compiled is not None:
            try:
                if self._is_on_device and indices is not None:
                    result = self._compiled.summarized_step(rollout, indices, self._numbers)
                else:
                    result = self._compiled.step(rollout, indices, self._numbers)
            except CompilationError as error:
                self._compiled.flat.detach()
                self._compiled = None
                self._engine.give_up_compiling(str(error))

        if result is None:
            result = self._eager(rollout, indices)
            if self._is_on_device:
                result = summarize(result, self._numbers)
        self.statistics.add(result)
        return result


class Accelerated(OnPolicyAlgorithm):
    """An on-policy algorithm of SB3 that has an engine."""

    # What the engine reads in addition to the attributes of OnPolicyAlgorithm.
    batch_size: Any  # an int; sb3-contrib allows None
    normalize_advantage: bool
    clip_range_vf: Schedule | None
    _engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The engine of this model, which is never saved."""
        if self._engine is None:
            self._engine = Engine()
        return self._engine

    def engine_options(self) -> Options:
        """Return the settings of the engine."""
        raise NotImplementedError

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_engine"]
