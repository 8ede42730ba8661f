"""Say which path each part of a training takes, and why.

The reasons are those of ``rules.py``. Nothing is decided here, and nothing of the model is changed.
"""

from dataclasses import dataclass

from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor

from sb3_ano.fast.engine import Accelerated
from sb3_ano.fast.policy import is_recurrent
from sb3_ano.fast.rules import decide, device_of, steps_to_pay


@dataclass(frozen=True)
class Path:
    """The path of one part.

    :param path: what computes the part
    :param reason: reason for which it is not the fast path, or None
    """

    path: str
    reason: str | None = None

    def __str__(self) -> str:
        return self.path if self.reason is None else f"{self.path}, because {self.reason}"


@dataclass(frozen=True)
class Explanation:
    """The paths of a model; ``print`` shows them line by line.

    :param acting: who computes actions, values and log-probabilities in a rollout
    :param rollout: who writes the rollout buffer
    :param device: whether rollouts stay on the device as tensors
    :param update: who computes loss, gradient and step of a minibatch
    :param compilation: whether the update is compiled
    """

    acting: Path
    rollout: Path
    device: Path
    update: Path
    compilation: Path

    def __str__(self) -> str:
        parts = {
            "acting": self.acting,
            "rollout": self.rollout,
            "device": self.device,
            "update": self.update,
            "compilation": self.compilation,
        }
        return "\n".join(f"{name}: {path}" for name, path in parts.items())


def explain(model: OnPolicyAlgorithm) -> Explanation:
    """Return the path that each part of a training takes, and why; ``print`` it to read it.

    :param model: on-policy algorithm of SB3, sb3-contrib, or this package
    :raises TypeError: if the model is no on-policy algorithm
    """
    if not isinstance(model, OnPolicyAlgorithm):
        raise TypeError(f"{type(model).__name__} is no on-policy algorithm; allowed are PPO, ANO and their variants")
    if not isinstance(model, Accelerated):
        plain = Path("as in SB3", "the model is not accelerated; accelerate(model) does that for PPO and its variants")
        return Explanation(plain, plain, plain, plain, plain)

    # Decided for the model as it is now. The engine decides again at the next rollout.
    options = model.engine_options()
    decisions = decide(model, options)

    # The order of make_actor.
    if is_recurrent(model.policy):
        acting = Path("the policy, step by step", decisions.acting)
    elif decisions.acting is None:
        acting = Path("NumPy")
    elif decisions.policy is None:
        acting = Path("PyTorch, with the layers of SB3", decisions.acting)
    else:
        acting = Path("the policy's own methods", decisions.policy)

    rollout = Path("the arrays of SB3's buffer")
    if decisions.rollout is not None:
        rollout = Path("the methods of the buffer", decisions.rollout)

    device = Path("tensors on the device of the policy")
    if decisions.device is not None:
        device = Path("arrays on the CPU", decisions.device)
    elif device_of(model.env) is None and _sees_vectors(model.policy):
        # Measured with one HalfCheetah: the GPU makes 0.79 of the CPU's steps per second (docs/gpu.md).
        device = Path("tensors on the device of the policy; with networks without images, a CPU is usually faster")

    # A policy that is called leaves the fast path more than an optimizer does, and is named first.
    if decisions.policy is not None:
        update = Path("the policy's own methods", decisions.policy)
    elif decisions.optimizer is not None:
        update = Path("the optimizer's own step", decisions.optimizer)
    elif model.device.type == "cpu":
        update = Path("layers of SB3, and a fused step of Adam")
    else:
        update = Path("layers of SB3, and the optimizer's own step")

    # What was tried and failed comes before what the rules say.
    compilation = Path("compiled")
    obstacle = model.engine.obstacle
    if obstacle is not None:
        compilation = Path("not compiled", obstacle)
    elif decisions.is_short_run and not model._total_timesteps:
        # Before learn, the length of the training is not known.
        compilation = Path(f"compiled in trainings from {steps_to_pay(model):,.0f} steps on")
    elif decisions.compilation is not None:
        compilation = Path("not compiled", decisions.compilation)
    return Explanation(acting, rollout, device, update, compilation)


def _sees_vectors(policy: ActorCriticPolicy) -> bool:
    return isinstance(policy.features_extractor, FlattenExtractor)
