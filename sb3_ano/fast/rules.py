"""The decisions about the path that each part of a training takes, as one table.

A rule gives the reason for which a model leaves the fast path of a part, or None. The first rule of a part that gives a reason
decides. Rules look at the identity of types and functions, never at the names of classes or modules: an empty subclass is what
it is a subclass of.

The rules read the model as it is now. What callbacks may do to it is below them: :func:`needs_no_locals` and
:func:`changes_nothing`. Three decisions are made elsewhere, each from a :class:`Decisions`, because they need what is only
available there, and no user can change them: ``make_actor`` in ``act.py`` copies layers if they are small, and draws actions
in NumPy or PyTorch; ``DeviceRollout._select_functions`` in ``device.py`` compiles acting if the update is compiled; and
``Engine.prepare_update`` leaves a model uncompiled once its compilation has failed.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import stable_baselines3.common.distributions as distributions
import stable_baselines3.common.policies as sb3_policies
import stable_baselines3.common.torch_layers as sb3_layers
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    ConvertCallback,
    EvalCallback,
    EventCallback,
    EveryNTimesteps,
    LogEveryNTimesteps,
    ProgressBarCallback,
    StopTrainingOnNoModelImprovement,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, MlpExtractor, NatureCNN
from stable_baselines3.common.vec_env import VecEnv
from torch import nn
from torch.optim import Adam

from sb3_ano.envs.tensor import TensorVecEnv
from sb3_ano.envs.vec_normalize import VecNormalize
from sb3_ano.fast.buffer import DeviceBuffer
from sb3_ano.fast.policy import base_of, contrib_class, contrib_policies, has_library_distribution, is_maskable, is_recurrent
from sb3_ano.fast.private import has_hooks
from sb3_ano.policies import CriticOnlyKeys, Hidden

#: Seconds that a compilation takes: about 10 on two cores with an empty cache.
COMPILE_SECONDS = 11.0
#: Seconds that a compiled minibatch saves: a constant, and a part for each sample and parameter. Both are low guesses, from
#: networks of 64-64 and 256-256. Convolutions save several times more.
SAVED_SECONDS = 4e-4
SAVED_SECONDS_PER_PRODUCT = 2e-11
#: OpenBLAS multiplies matrices with more than this many products in several threads. They go on spinning for a while, on the
#: processors that environments could use.
ONE_THREAD = 4 * 65536

# Methods of a policy that the engine does the work of, or relies on. Others may be overridden, because they are called.
_EVALUATING = (
    # How PyTorch calls a module.
    "__call__",
    "__getattr__",
    "_call_impl",
    "_wrapped_call_impl",
    # What PolicyEvaluation computes.
    "forward",
    "evaluate_actions",
    "predict_values",
    "extract_features",
    "_get_action_dist_from_latent",
    # What actors and the rollout do with observations and actions.
    "obs_to_tensor",
    "unscale_action",
    # What rules, copies and compiled code read.
    "device",
    "squash_output",
    "parameters",
    "named_parameters",
    "modules",
    "named_modules",
    "children",
)
# Methods of a rollout buffer that the engine does the work of.
_COLLECTING = (
    "reset",
    "add",
    "compute_returns_and_advantage",
    "get",
    "_get_samples",
    "to_torch",
    "swap_and_flatten",
)
# Options of Adam that the engine reads, or that change its speed only. The others must have the defaults of PyTorch.
_FREE_OPTIONS = ("params", "lr", "initial_lr", "betas", "eps", "foreach", "fused")
_ADAM = inspect.signature(Adam).parameters
# Names that every class has, also one without a body.
_EMPTY_BODY = {
    "__module__",
    "__doc__",
    "__annotations__",
    # Python 3.13 and 3.14.
    "__annotate__",
    "__annotate_func__",
    "__annotations_cache__",
    "__firstlineno__",
    "__static_attributes__",
    # Generic and abstract classes.
    "__orig_bases__",
    "__parameters__",
    "__abstractmethods__",
    "_abc_impl",
}
# Callbacks of SB3 that only read the policy, and no local variables, unless they call a function or callback of the user's.
_READING = {
    CheckpointCallback,
    ConvertCallback,
    EvalCallback,
    EventCallback,
    EveryNTimesteps,
    LogEveryNTimesteps,
    ProgressBarCallback,
    StopTrainingOnNoModelImprovement,
    StopTrainingOnRewardThreshold,
}


@dataclass(frozen=True)
class Options:
    """The settings of the engine.

    :param torch_compile: whether to compile the update; ``"auto"`` does it if the run is long enough to pay for that
    :param precision: ``"float32"``, or ``"bfloat16"`` for the layers of features extractor and networks
    """

    torch_compile: bool | str = "auto"
    precision: str = "float32"


class Rule(NamedTuple):
    """One reason to leave the fast path of a part.

    :param part: ``"policy"``: the engine computes what SB3's methods do; ``"acting"``: in NumPy; ``"rollout"``: arrays are
        written directly; ``"device"``: all of it as tensors on the device; ``"optimizer"``: the engine makes Adam's step;
        ``"compilation"``: the compiled update
    :param name: short name of the rule
    :param reason: function of the model and the options that returns the reason, or None; or a part whose reason it is
    :param changeable: whether the user can change it, and is told about it
    """

    part: str
    name: str
    reason: Callable[[OnPolicyAlgorithm, Options], str | None] | str
    changeable: bool = True


def solid_class(kind: type) -> type:
    """Return a class, or the first of its bases that adds something to its own bases."""
    for part in kind.__mro__:
        if not vars(part).keys() <= _EMPTY_BODY:
            return part
    return kind


def _classes(*modules: ModuleType) -> set[type]:
    classes = set()
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, nn.Module):
                classes.add(value)
    return classes


_LIBRARY_CLASSES = _classes(nn, sb3_layers, sb3_policies) | {CriticOnlyKeys, Hidden}


def is_library_code(module: nn.Module) -> bool:
    """Tell whether a module and those in it are of PyTorch's and SB3's classes, which keep only tensors between calls."""
    for part in module.modules():
        kind = solid_class(type(part))
        # Those of sb3-contrib are looked up each time, because it may be imported at any time.
        if kind not in _LIBRARY_CLASSES and kind not in _classes(*contrib_policies()):
            return False
    return True


def replaced_method(instance: object, names: Iterable[str] | None = None) -> str | None:
    """Return the name of the first method of a class that was replaced on this instance of it, or None.

    :param instance: any object
    :param names: names of the methods that count; None for all
    """
    for name in vars(instance):
        # Most attributes of an instance are not attributes of its class.
        method = getattr(type(instance), name, None)
        if method is not None and (names is None or name in names) and callable(method):
            return name
    return None


# Policy


def _overrides(model: OnPolicyAlgorithm, options: Options) -> str | None:
    kind = type(model.policy)
    base = base_of(model.policy)
    names: tuple[str, ...] = _EVALUATING
    if is_recurrent(model.policy):
        # The update runs sequences in another way.
        names = (*_EVALUATING, "_process_sequence")

    for name in names:
        if getattr(kind, name) is not getattr(base, name):
            return f"{kind.__name__} overrides {name}"
    return None


def _replaced(model: OnPolicyAlgorithm, options: Options) -> str | None:
    policy = model.policy
    for path, module in policy.named_modules():
        # Any method of a layer counts, because layers are copied, and rebuilt in NumPy.
        names = None
        if module is policy:
            names = _EVALUATING
        replaced = replaced_method(module, names)
        if replaced is not None:
            return f"{_place(path)}.{replaced} was replaced"

    # The distribution is no module.
    replaced = replaced_method(policy.action_dist)
    if replaced is not None:
        return f"policy.action_dist.{replaced} was replaced"
    return None


def _module_hooks(model: OnPolicyAlgorithm, options: Options) -> str | None:
    for path, module in model.policy.named_modules():
        if has_hooks(module):
            return f"{_place(path)} has hooks"
    return None


def _place(path: str) -> str:
    # The policy itself has the empty path.
    if not path:
        return "policy"
    return f"policy.{path}"


def _masked_distribution(model: OnPolicyAlgorithm, options: Options) -> str | None:
    if is_maskable(model.policy) and not has_library_distribution(model.policy):
        return "its distribution is not sb3-contrib's"
    return None


# Acting


def _has_lstm(model: OnPolicyAlgorithm, options: Options) -> str | None:
    if is_recurrent(model.policy):
        return "it has an LSTM"
    return None


def _not_float32(model: OnPolicyAlgorithm, options: Options) -> str | None:
    if options.precision != "float32":
        return f"precision={options.precision!r}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    for name, parameter in model.policy.named_parameters():
        if type(parameter) is not nn.Parameter or parameter.dtype != torch.float32:
            return f"policy.{name} is not a float32 parameter"
    return None


def _not_on_cpu(model: OnPolicyAlgorithm, options: Options) -> str | None:
    if model.policy.device.type != "cpu":
        return f"the policy is on {model.policy.device}"
    return None


def _has_images(model: OnPolicyAlgorithm, options: Options) -> str | None:
    space = model.policy.observation_space
    parts = [space]
    if isinstance(space, spaces.Dict):
        parts = list(space.spaces.values())

    for part in parts:
        # NumpyActor does not know a Dict within a Dict, either.
        if isinstance(part, spaces.Dict) or len(part.shape or ()) == 3:
            return "observations have images"
    return None


def _custom_extractor(model: OnPolicyAlgorithm, options: Options) -> str | None:
    extractor: Any
    for extractor in (model.policy.pi_features_extractor, model.policy.vf_features_extractor):
        kind = solid_class(type(extractor))
        if kind not in (FlattenExtractor, CombinedExtractor):
            return f"{type(extractor).__name__} is not a plain extractor of features"

        flattens = [extractor.flatten] if kind is FlattenExtractor else extractor.extractors.values()
        for part in flattens:
            # Hidden stands for an observation that only the critic sees.
            if solid_class(type(part)) not in (nn.Flatten, Hidden):
                return f"{type(part).__name__} is not a plain extractor of features"
    return None


def _custom_network(model: OnPolicyAlgorithm, options: Options) -> str | None:
    policy = model.policy
    if solid_class(type(policy.mlp_extractor)) is not MlpExtractor:
        return f"{type(policy.mlp_extractor).__name__} is not SB3's network"

    networks = (
        (policy.mlp_extractor.policy_net, policy.action_net),
        (policy.mlp_extractor.value_net, policy.value_net),
    )
    activations = set()
    for network, head in networks:
        if solid_class(type(network)) is not nn.Sequential:
            return f"{type(network).__name__} is not SB3's network"

        # SB3's networks alternate between linear layers and activations.
        layers = [*network, head]
        activations |= {type(layer) for layer in layers[1::2]}
        for layer in layers[::2]:
            if type(layer) is not nn.Linear or layer.bias is None:
                return f"{type(layer).__name__} is not a linear layer with a bias"

    # One for both networks, because actor and critic may be joined.
    if len(activations) > 1 or not activations <= {nn.Tanh, nn.ReLU}:
        names = sorted(kind.__name__ for kind in activations)
        return f"the activation is {' and '.join(names)}, not Tanh or ReLU"
    return None


def _custom_distribution(model: OnPolicyAlgorithm, options: Options) -> str | None:
    policy = model.policy
    if getattr(policy, "use_sde", False):
        return "it explores by gSDE"
    if policy.squash_output:
        return "actions are squashed"
    if not has_library_distribution(policy):
        return f"{type(policy.action_dist).__name__} is not the distribution that SB3 makes"
    # A user may have replaced log_std, for instance by one number for all actions.
    is_gaussian = type(policy.action_dist) is distributions.DiagGaussianDistribution
    if is_gaussian and policy.log_std.shape != (getattr(policy.action_net, "out_features", None),):
        return "log_std has another shape than the actions"
    return None


def _wide_layers(model: OnPolicyAlgorithm, options: Options) -> str | None:
    # NumPy would multiply in several threads, too, which then spin in the way of the environments.
    n_envs = model.n_envs
    for layer in model.policy.modules():
        if isinstance(layer, nn.Linear) and n_envs * layer.weight.numel() > ONE_THREAD:
            return f"PyTorch multiplies {n_envs} observations by {layer.weight.numel()} weights faster"
    return None


# Rollout


def _custom_buffer(model: OnPolicyAlgorithm, options: Options) -> str | None:
    buffer = model.rollout_buffer
    kind: type = type(buffer)
    if issubclass(kind, DeviceBuffer):
        # The engine has put it in front of the class of the buffer.
        kind = kind.__mro__[kind.__mro__.index(DeviceBuffer) + 1]
    masked = contrib_class("maskable.buffers", "MaskableRolloutBuffer")
    dict_masked = contrib_class("maskable.buffers", "MaskableDictRolloutBuffer")
    known = [base for base in (RolloutBuffer, DictRolloutBuffer, masked, dict_masked) if base is not None]

    # A subclass may add what it likes to a buffer, as long as it leaves these methods alone.
    if solid_class(kind) not in known:
        for name in _COLLECTING:
            method = getattr(kind, name)
            if not any(method is getattr(base, name) for base in known):
                return f"{kind.__name__} overrides {name}"

    replaced = replaced_method(buffer, _COLLECTING)
    if replaced is not None:
        return f"rollout_buffer.{replaced} was replaced"
    return None


# Optimizer


def _other_optimizer(model: OnPolicyAlgorithm, options: Options) -> str | None:
    if solid_class(type(model.policy.optimizer)) is not Adam or len(model.policy.optimizer.param_groups) > 1:
        return "its optimizer is not a plain Adam"
    return None


def _adam_options(model: OnPolicyAlgorithm, options: Options) -> str | None:
    # Weight decay, AMSGrad and so on: the engine's own step has none of them.
    for name, value in model.policy.optimizer.param_groups[0].items():
        if name not in _FREE_OPTIONS and value != _ADAM[name].default:
            return f"its optimizer is not a plain Adam: {name}={value}"
    return None


def _optimizer_hooks(model: OnPolicyAlgorithm, options: Options) -> str | None:
    optimizer = model.policy.optimizer
    if replaced_method(optimizer) is not None or has_hooks(optimizer):
        return "its optimizer has hooks, or a method of it was replaced"
    return None


def _parameter_hooks(model: OnPolicyAlgorithm, options: Options) -> str | None:
    for name, parameter in model.policy.named_parameters():
        if parameter.requires_grad and has_hooks(parameter):
            return f"policy.{name} has hooks"
    return None


def _other_parameters(model: OnPolicyAlgorithm, options: Options) -> str | None:
    policy = model.policy
    # By identity: comparing parameters with == would compare their numbers. The order counts, because the vectors of a
    # compiled update follow the optimizer, and the names in its loss the policy.
    trained = policy.optimizer.param_groups[0]["params"]
    of_policy = [id(parameter) for parameter in policy.parameters() if parameter.requires_grad]
    of_optimizer = [id(parameter) for parameter in trained if parameter.requires_grad]
    if of_policy != of_optimizer:
        return "its optimizer has other parameters than the policy, or another order"
    return None


def _parameter_types(model: OnPolicyAlgorithm, options: Options) -> str | None:
    kinds = set()
    for parameter in model.policy.parameters():
        if parameter.requires_grad:
            kinds.add((type(parameter), parameter.dtype, parameter.device, parameter.layout))
    if kinds != {(nn.Parameter, torch.float32, model.policy.device, torch.strided)}:
        return "its parameters are not float32 on one device"
    return None


def _frozen_gradient(model: OnPolicyAlgorithm, options: Options) -> str | None:
    for name, parameter in model.policy.named_parameters():
        if parameter.grad is not None and not parameter.requires_grad:
            return f"the frozen policy.{name} has a gradient, which counts for the norm"
    return None


# Device


def device_of(env: VecEnv | None) -> torch.device | None:
    """Return the device of environments that can be stepped on it, as they are or in a VecNormalize of this package."""
    # Other wrappers, and SB3's VecNormalize, take arrays.
    if type(env) is VecNormalize:
        env = env.venv
    if isinstance(env, TensorVecEnv):
        return env.device
    return None


def _other_device(model: OnPolicyAlgorithm, options: Options) -> str | None:
    # With ordinary environments and a policy on the CPU, tensors would gain nothing over arrays.
    device = device_of(model.env)
    if device is None and model.device.type != "cuda":
        return "the environments are not a TensorVecEnv, and the policy is on the CPU"
    if device is not None and device.type != model.device.type:
        return f"the environments are on {device}, and the policy is on {model.device}"
    return None


def _new_noise(model: OnPolicyAlgorithm, options: Options) -> str | None:
    if model.use_sde:
        return "gSDE makes new noise matrices"
    if model.policy.squash_output:
        return "the policy squashes its actions"
    return None


# Compilation


def _not_wanted(model: OnPolicyAlgorithm, options: Options) -> str | None:
    if options.torch_compile is False:
        return "torch_compile=False"
    return None


def _short_run(model: OnPolicyAlgorithm, options: Options) -> str | None:
    # An estimate, not a measurement, so that one seed gives one result on one machine. In a call of learn that continues a
    # training, only the steps of that call count.
    steps = steps_to_pay(model)
    planned = model._total_timesteps - model._num_timesteps_at_start
    if options.torch_compile == "auto" and planned < steps:
        return f"compilation pays from {steps:,.0f} steps on, and this run has {planned:,}"
    return None


def steps_to_pay(model: Any) -> float:
    """Return the steps of a training from which on compilation saves more time than it takes.

    :param model: PPO, or an algorithm with its ``batch_size`` and ``n_epochs``
    """
    n_parameters = sum(parameter.numel() for parameter in model.policy.parameters())
    products = model.batch_size * n_parameters
    saved_per_minibatch = SAVED_SECONDS + SAVED_SECONDS_PER_PRODUCT * products
    minibatches = COMPILE_SECONDS / saved_per_minibatch
    # Each step of the environments is in n_epochs minibatches.
    return float(minibatches * model.batch_size / model.n_epochs)


def _compiles_no_lstm(model: OnPolicyAlgorithm, options: Options) -> str | None:
    if is_recurrent(model.policy):
        return "LSTM policies are not compiled"
    return None


def _uneven_steps(model: OnPolicyAlgorithm, options: Options) -> str | None:
    optimizer = model.policy.optimizer
    steps = set()
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.requires_grad:
            # Without a state, Adam has made no step.
            state = optimizer.state.get(parameter, {})
            steps.add(float(state.get("step", 0.0)))

    # The vectors have one count of steps for all parameters.
    if len(steps) > 1:
        return "some of its parameters were trained longer than others"
    return None


def _tied_parameters(model: OnPolicyAlgorithm, options: Options) -> str | None:
    owned = []
    for module in model.policy.modules():
        for parameter in module.parameters(recurse=False):
            owned.append(id(parameter))

    # functional_call would replace a shared parameter in one of its places only.
    if len(owned) > len(set(owned)):
        return "several of its layers share parameters"
    return None


#: All rules, in the order in which they are asked.
RULES = [
    Rule("policy", "overridden method", _overrides),
    Rule("policy", "replaced method", _replaced),
    Rule("policy", "hooks of modules", _module_hooks),
    Rule("policy", "masked distribution", _masked_distribution),
    Rule("acting", "policy", "policy"),
    Rule("acting", "LSTM", _has_lstm, changeable=False),
    Rule("acting", "precision", _not_float32, changeable=False),
    Rule("acting", "device", _not_on_cpu, changeable=False),
    Rule("acting", "images", _has_images, changeable=False),
    Rule("acting", "features extractor", _custom_extractor, changeable=False),
    Rule("acting", "network", _custom_network, changeable=False),
    Rule("acting", "distribution", _custom_distribution, changeable=False),
    Rule("acting", "wide layers", _wide_layers, changeable=False),
    Rule("rollout", "LSTM", _has_lstm, changeable=False),
    Rule("rollout", "buffer", _custom_buffer),
    Rule("device", "device", _other_device, changeable=False),
    Rule("device", "LSTM", _has_lstm, changeable=False),
    Rule("device", "noise", _new_noise, changeable=False),
    Rule("device", "policy", "policy"),
    Rule("device", "rollout", "rollout"),
    Rule("optimizer", "class", _other_optimizer),
    Rule("optimizer", "options of Adam", _adam_options),
    Rule("optimizer", "hooks of the optimizer", _optimizer_hooks),
    Rule("optimizer", "hooks of parameters", _parameter_hooks),
    Rule("optimizer", "parameters of the optimizer", _other_parameters),
    Rule("optimizer", "types of parameters", _parameter_types),
    Rule("optimizer", "frozen parameter", _frozen_gradient),
    Rule("compilation", "not wanted", _not_wanted, changeable=False),
    Rule("compilation", "LSTM", _compiles_no_lstm, changeable=False),
    Rule("compilation", "policy", "policy"),
    Rule("compilation", "optimizer", "optimizer"),
    Rule("compilation", "uneven steps", _uneven_steps),
    Rule("compilation", "tied parameters", _tied_parameters),
    # Last, because a longer training would be compiled.
    Rule("compilation", "short run", _short_run, changeable=False),
]


def apply_rules(model: OnPolicyAlgorithm, options: Options) -> dict[str, tuple[Rule, str] | None]:
    """Return, for each part, the first rule that gives a reason, and the reason; None where the fast path is taken."""
    first: dict[str, tuple[Rule, str] | None] = {}
    for rule in RULES:
        if first.setdefault(rule.part, None) is not None:
            continue

        if isinstance(rule.reason, str):
            # The reason of a part whose rules stand before.
            reason = _reason(first[rule.reason])
        else:
            reason = rule.reason(model, options)
        if reason is not None:
            first[rule.part] = (rule, reason)

    return first


def _reason(applied: tuple[Rule, str] | None) -> str | None:
    return None if applied is None else applied[1]


def first_reason(model: OnPolicyAlgorithm, options: Options, part: str) -> str | None:
    """Return the reason for which a model leaves the fast path of a part, or None."""
    return _reason(apply_rules(model, options)[part])


@dataclass(frozen=True)
class Decisions:
    """Hold the decisions for one rollout and its update. A reason is None if the fast path is taken.

    :param policy: reason to call the policy's own methods
    :param acting: reason not to act in NumPy
    :param rollout: reason to call the methods of the rollout buffer
    :param device: reason to collect in NumPy, and not as tensors on the device
    :param optimizer: reason to call the optimizer's own step
    :param compilation: reason not to compile the update
    :param changeable: reasons that the user can change, and is told about
    :param is_short_run: whether only the length of the training speaks against compilation
    :param library_code: whether all modules are PyTorch's and SB3's, which keep nothing between calls but tensors
    :param channels_last: whether images are given to the features extractor in that memory format
    """

    policy: str | None
    acting: str | None
    rollout: str | None
    device: str | None
    optimizer: str | None
    compilation: str | None
    changeable: tuple[str, ...]
    is_short_run: bool
    library_code: bool
    channels_last: bool


def decide(model: OnPolicyAlgorithm, options: Options) -> Decisions:
    """Apply the rules to a model as it is now."""
    policy = model.policy
    applied = apply_rules(model, options)
    reasons = {part: _reason(first) for part, first in applied.items()}

    # One reason may be that of several parts. LSTM policies are called as they are, and gain little.
    changeable = []
    for first in applied.values():
        if first is None or is_recurrent(policy):
            continue
        rule, reason = first
        if rule.changeable and reason not in changeable:
            changeable.append(reason)

    # SB3's convolutions are faster in channels_last, but a custom extractor may read how its input lies in memory.
    channels_last = True
    for extractor in {policy.features_extractor, policy.pi_features_extractor, policy.vf_features_extractor}:
        if solid_class(type(extractor)) not in (NatureCNN, CombinedExtractor) or not is_library_code(extractor):
            channels_last = False

    compilation = applied["compilation"]
    return Decisions(
        **reasons,
        changeable=tuple(changeable),
        is_short_run=compilation is not None and compilation[0].reason is _short_run,
        # With SB3's classes only, nothing but tensors changes from call to call: guards and recorded graphs rely on it.
        library_code=reasons["policy"] is None and has_library_distribution(policy) and is_library_code(policy),
        channels_last=channels_last,
    )


# Callbacks


def needs_no_locals(callback: BaseCallback) -> bool:
    """Tell whether a callback is SB3's placeholder for none, a progress bar, or says ``reads_locals = False``.

    The rollout then makes no tensors of values and log-probabilities for it, which SB3's loop has as local variables.
    """
    if type(callback) is CallbackList:
        return all(map(needs_no_locals, callback.callbacks))
    if getattr(callback, "reads_locals", True) is False:
        return True
    # SB3 converts None to a ConvertCallback of None.
    return type(callback) is ProgressBarCallback or (type(callback) is ConvertCallback and callback.callback is None)


def changes_nothing(callback: BaseCallback | None) -> bool:
    """Tell whether a callback is known to leave the policy alone, and not to read local variables.

    Then the policy need not be compared at each step, and the rollout can stay on a device.
    """
    if type(callback) is CallbackList:
        return all(map(changes_nothing, callback.callbacks))
    if callback is None or needs_no_locals(callback):
        return True
    if solid_class(type(callback)) not in _READING:
        return False

    # A method may have been replaced on the instance.
    attributes = vars(callback)
    if attributes.keys() & {"on_step", "_on_step", "_log_data"}:
        return False
    # What the callback calls may be a user's.
    return changes_nothing(attributes.get("callback")) and changes_nothing(attributes.get("callback_on_new_best"))
