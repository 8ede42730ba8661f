"""The state of the engine between the updates of a model, and one update.

``train`` asks :meth:`Engine.prepare_update` for an :class:`Update`, once for each rollout. Within the context of the update,
:meth:`Update.minibatches` yields the minibatches of one epoch, and :meth:`Update.step` makes the step of one of them, compiled
or not. How many epochs there are, and when they end, is up to ``train``.
"""

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
from sb3_ano.fast.act import Actor, RolloutCheck, make_actor
from sb3_ano.fast.buffer import DeviceBuffer
from sb3_ano.fast.compiled import CompilationError, CompiledStep, FlatVectors, compiler_options, make_step
from sb3_ano.fast.device import DeviceRollout, Replayed, make_rollout
from sb3_ano.fast.policy import PolicyEvaluation, RecurrentEvaluation, is_recurrent
from sb3_ano.fast.private import compiler_obstacle, tracing
from sb3_ano.fast.rules import Decisions, Options, decide, device_of
from sb3_ano.fast.step import (
    EagerStep,
    Numbers,
    NumberTensors,
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
    kind = PolicyEvaluation
    if is_recurrent(policy):
        kind = RecurrentEvaluation
    calls_policy = decisions.policy is not None
    return kind(policy, precision, calls_policy, decisions.channels_last)


class Engine:
    """Keep decisions and compiled code of one model. It is never saved; a copy of a model gets a new one."""

    def __init__(self) -> None:
        #: Decisions for the rollout that was collected last; None if they have to be made again, see expire_decisions.
        self.decisions: Decisions | None = None
        #: Whether the user was told about masks that allow no action in this training.
        self.warned_of_masks = False
        # Evaluation of the policy for the next update.
        self._evaluation: PolicyEvaluation | None = None
        # Compiled code and tensors of a rollout are kept between updates, because making them takes seconds, and memory.
        self._compiled: _CompiledUpdate | None = None
        self._device_rollout: DeviceRollout | None = None
        #: Reason for which compilation was given up.
        self.obstacle: str | None = None
        self._is_warned = False

    def __reduce__(self) -> tuple[type["Engine"], tuple[()]]:
        # Compiled code can be neither pickled nor copied.
        return Engine, ()

    def forget(self) -> None:
        """Drop compiled code and decisions, because the model has changed in a way that no rule sees."""
        self.decisions = None
        self._evaluation = None
        self._compiled = None
        self._device_rollout = None
        self.obstacle = None

    def expire_decisions(self) -> None:
        """Let the next user of the decisions decide again, because a callback or the user may have changed the model."""
        self.decisions = None

    @property
    def must_decide_again(self) -> bool:
        """Tell whether a callback may have changed the model since the rollout began."""
        return self.decisions is None

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
        # Not that of the update, because acting may use copies of the layers, and the update changes the layers themselves.
        evaluation = make_evaluation(model.policy, options.precision, decisions)
        return make_actor(model, evaluation, decisions)

    def prepare_update(
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
        self.expire_decisions()

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

        # Said by the update, because a rollout may be decided about several times.
        if decisions.changeable:
            reasons = "; ".join(decisions.changeable)
            self._warn(f"this training leaves the fast path: {reasons}. print(explain(model)) shows what runs instead")

        # The whole rollout as tensors, if the engine knows how the buffer stores it.
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
        check: RolloutCheck | None,
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
        # What compiled code has as constants. Identity of the tensors: a new policy, or a loaded optimizer, has other ones.
        made_for = (
            [id(model.policy), id(model.policy.optimizer), *map(id, trained_parameters(model.policy.optimizer))],
            (settings, options.precision, has_known_loss, loss_constants),
            (decisions.library_code, decisions.channels_last),
            (model.policy.normalize_images, model.policy.observation_space),
        )
        if self._compiled is not None and self._compiled.made_for == made_for:
            return self._compiled

        # What PyTorch lacks is found before it is tried, because its own errors fill a screen.
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
        made_for: object,
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
        self._replayed: dict[tuple[int, int], tuple[torch.Tensor, NumberTensors, Replayed[StepSummary]]] = {}

    def start_epoch(self) -> None:
        """Check again what compiled code depends on."""
        for step in self._steps.values():
            step.start_epoch()

    def step(
        self,
        rollout: Any,
        indices: torch.Tensor | None,
        numbers: NumberTensors,
    ) -> StepResult:
        """Make one step; see :class:`~sb3_ano.fast.compiled.CompiledStep`."""
        if indices is None:
            length = len(rollout.advantages)
        else:
            length = len(indices)
        variant = (length, indices is None)

        # Usually two: whole minibatches, and a last one that is shorter.
        if variant not in self._steps:
            products = length * self._n_parameters
            options = compiler_options(self._policy.device, products, self._known_code)
            # Custom modules may change at every call, and minibatches of a custom buffer may differ in their types.
            is_constant = self._library_code and indices is not None
            self._steps[variant] = CompiledStep(self._step, options, is_constant)
        return self._steps[variant](self.flat.vectors, rollout, indices, numbers)

    def summarized_step(
        self,
        rollout: Any,
        indices: torch.Tensor,
        numbers: NumberTensors,
    ) -> StepSummary:
        """Make one step on a rollout whose tensors stay in their places; on CUDA, it is recorded as a graph and replayed."""
        if not self._is_recordable:
            return summarize(self.step(rollout, indices, numbers), numbers)

        key = (len(indices), rollout.advantages.data_ptr())
        if key not in self._replayed:
            # The graph reads these tensors, into which each minibatch copies its own.
            places = indices.clone()
            values = NumberTensors(*[number.clone() for number in numbers])
            function = functools.partial(self._step_and_summary, rollout, places, values)
            self._replayed[key] = (places, values, Replayed(function, self._policy.device))

        places, values, replayed = self._replayed[key]
        places.copy_(indices)
        for value, number in zip(values, numbers, strict=True):
            value.copy_(number)
        summary = replayed()
        # The next replay overwrites it. Of log_ratio, nothing is read later than that.
        return StepSummary(summary.numbers.clone(), summary.log_ratio, summary.stop)

    def _step_and_summary(
        self,
        rollout: Any,
        indices: torch.Tensor,
        numbers: NumberTensors,
    ) -> StepSummary:
        return summarize(self.step(rollout, indices, numbers), numbers)


class Update:
    """One update, that is one call of ``train``; a context: what a user holds is plain before and after it.

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
        # Then the results of minibatches are not read before the end of the update, because reading waits for the device.
        self._is_on_device = isinstance(self._buffer, DeviceBuffer) and bool(self._buffer.held)
        # The order of SB3 is drawn on the host, for environments that are there, too.
        self._draws_on_device = self._is_on_device and device_of(model.env) is not None and policy.device.type == "cuda"
        self._numbers = NumberTensors.on_device(numbers, policy.device)
        # Always there, because a compilation may fail in the middle of an update. The fused kernel was measured on the CPU.
        is_fused = decisions.optimizer is None and policy.device.type == "cpu"
        self._eager = EagerStep(policy, evaluation, settings, self._numbers, is_fused)
        self._context = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._compiled is not None:
            # Registered before attach, so that parameters are copied back however the update ends.
            self._context.callback(self._compiled.flat.detach)
            self._compiled.flat.attach()
            self._context.enter_context(tracing())
        return self

    def __exit__(self, *error: object) -> None:
        self._context.close()

    def minibatches(self) -> Iterator[tuple[Any, torch.Tensor | None]]:
        """Iterate over the minibatches of one epoch, in random order.

        :return: the whole rollout and the indices of a minibatch; or, if the buffer makes minibatches, one of those and None
        """
        self.statistics.epoch_start = len(self.statistics)
        if self._compiled is not None:
            self._compiled.start_epoch()

        rollout = self._rollout
        if rollout is not None:
            n_samples = len(rollout.advantages)
            # NumPy's generator, as in SB3's buffer, so that the minibatches are the same.
            if self._draws_on_device:
                order = torch.randperm(n_samples, device=rollout.advantages.device)
            else:
                permutation = np.random.permutation(n_samples)
                order = torch.from_numpy(permutation).to(rollout.advantages.device)
            for indices in order.split(int(self._batch_size)):
                yield rollout, indices
            return

        # A custom buffer, or one of sequences: it makes its minibatches itself.
        for samples in self._buffer.get(self._batch_size):
            if hasattr(samples, "lstm_states"):
                yield without_padding(samples), None
            else:
                yield samples, None

    def step(self, rollout: Any, indices: torch.Tensor | None) -> StepResult | StepSummary:
        """Make one step on a minibatch of :meth:`minibatches`, and record it."""
        result: StepResult | StepSummary | None = None
        if self._compiled is not None:
            try:
                if self._is_on_device and indices is not None:
                    result = self._compiled.summarized_step(rollout, indices, self._numbers)
                else:
                    result = self._compiled.step(rollout, indices, self._numbers)
            except CompilationError as error:
                # Nothing was changed by this minibatch. It, and all that follow, are made without compiled code, on the
                # parameters as the compiled steps before it left them.
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

    # What the engine reads in addition to the attributes of OnPolicyAlgorithm. Any: an int, but sb3-contrib allows None.
    batch_size: Any
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
