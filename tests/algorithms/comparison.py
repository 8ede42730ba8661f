"""The comparison of ``ANO(shaping="ppo")`` with SB3's PPO in one configuration."""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.policies import ActorCriticCnnPolicy, ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN

from sb3_ano import ANO, accelerate
from tests.algorithms.configurations import Callback, Configuration, chosen
from tests.common import parameters
from tests.tiny_envs import tiny_vec_env


def made(cls: Callable[..., Any], config: Configuration, **options: Any) -> Any:
    """A model; what SB3 has no use for in a combination is left out, the same for both classes."""
    observations, actions = chosen(config, "observations"), chosen(config, "actions")
    env = tiny_vec_env(observations, actions, config["n_envs"])
    if config["observations"] == "vector" or config["wrapper"] in ("none", "VecMonitor"):
        env = chosen(config, "wrapper")(env)

    kwargs: dict[str, Any] = {
        "net_arch": chosen(config, "net"),
        "activation_fn": chosen(config, "activation"),
        "share_features_extractor": config["share"],
        **copy.deepcopy(chosen(config, "optimizer")),
    }
    gsde = chosen(config, "gsde") if isinstance(actions, spaces.Box) else None
    kwargs |= gsde or {}
    policy, kwargs["features_extractor_class"] = ActorCriticPolicy, FlattenExtractor
    if isinstance(observations, spaces.Dict):
        policy, kwargs["features_extractor_class"] = MultiInputActorCriticPolicy, CombinedExtractor
        kwargs["features_extractor_kwargs"] = {"cnn_output_dim": 8}
    elif config["observations"] != "image" and chosen(config, "extractor") and isinstance(observations, spaces.Box):
        kwargs["features_extractor_class"] = chosen(config, "extractor")
    elif config["observations"] in ("image", "channels first"):
        policy, kwargs["features_extractor_class"] = ActorCriticCnnPolicy, NatureCNN
        kwargs["features_extractor_kwargs"] = {"features_dim": 8}
    kwargs |= config.get("kwargs", {})
    policy = chosen(config, "policy") or policy
    return cls(
        policy,
        env,
        use_sde=gsde is not None,
        policy_kwargs=kwargs,
        **{
            "n_steps": 8 if config["n_envs"] > 1 else 24,
            "n_epochs": 2,
            "learning_rate": 1e-2,
            "batch_size": config["batch_size"],
            "sde_sample_freq": config["sde_sample_freq"],
            "seed": config["seed"],
            "device": "cpu",
            **chosen(config, "options"),
            **options,
        },
    )


class Trained:
    """A training of two updates: the rollouts, how far the updates moved the parameters, and where these ended.

    :param rounding: seed of relative changes of the initial parameters by at most one rounding error, None for none
    """

    def __init__(self, cls: Callable[..., Any], config: Configuration, rounding: int | None = None, **options: Any) -> None:
        self.rollouts: list[dict[str, np.ndarray]] = []
        self.model = model = made(cls, config, **options)
        self.moved = 0.0
        if rounding is not None:
            generator = torch.Generator().manual_seed(rounding)
            for parameter in model.policy.parameters():
                parameter.data *= 1.0 + 6e-8 * (2.0 * torch.rand(parameter.shape, generator=generator) - 1.0)
        chosen(config, "before")(model)
        train = model.train

        def record_and_train() -> None:
            buffer = model.rollout_buffer
            self.rollouts.append({name: getattr(buffer, name).copy() for name in COMPARED})
            before = all_parameters(model)
            train()
            self.moved += (all_parameters(model) - before).norm().item()

        model.train = record_and_train
        change = chosen(config, "callback")
        steps = model.n_steps * model.n_envs
        model.learn(steps, callback=None if change is None else Callback(**change))
        chosen(config, "between")(model)
        model.learn(steps, reset_num_timesteps=False)
        self.after = all_parameters(model)


def all_parameters(model: Any) -> torch.Tensor:
    # Not parameters_to_vector, which needs views.
    return torch.cat([parameter.detach().flatten() for parameter in model.policy.parameters()])


COMPARED = ("actions", "values", "log_probs", "rewards", "advantages", "returns", "episode_starts")


def too_different(found: Trained, expected: Trained) -> dict[str, float]:
    """Return the largest differences as multiples of what is allowed, by name, if they are larger than that."""
    ratios = {"parameters": (found.after - expected.after).norm() / (1e-4 * expected.moved + 1e-7 * expected.after.norm())}
    for rollout, (mine, theirs) in enumerate(zip(found.rollouts, expected.rollouts, strict=True)):
        for name in COMPARED:
            allowed = 1e-4 * max(1.0, np.abs(theirs[name]).max())
            ratios[f"{name} of rollout {rollout}"] = np.abs(mine[name] - theirs[name]).max() / allowed
    return {name: float(ratio) for name, ratio in ratios.items() if not ratio <= 1.0}


def accelerated(cls: type, *args: Any, torch_compile: Any = "auto", precision: Any = "float32", **options: Any) -> Any:
    """Make a model of SB3 or sb3-contrib, and accelerate it."""
    model = cls(*args, **options)
    assert accelerate(model, torch_compile=torch_compile, precision=precision) is model
    assert isinstance(model, cls)
    return model


ACCELERATED_PPO = functools.partial(accelerated, PPO)
PPO_OF_ANO = functools.partial(ANO, shaping="ppo")


def assert_equals_sb3(config: Configuration, **options: Any) -> Trained | None:
    """Train SB3's PPO, accelerated PPO, and ANO; compare rollouts and parameters. Where SB3 raises, the others have to raise.

    :param config: one of :data:`CONFIGURATIONS`
    :param options: further arguments of the others
    :return: the training by SB3, or None if it raised
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = Trained(PPO, config)
        except Exception as error:
            for make in (ACCELERATED_PPO, PPO_OF_ANO):
                with pytest.raises(type(error)):
                    Trained(make, config, **options)
            return None
        trainings = [Trained(make, config, **options) for make in (ACCELERATED_PPO, PPO_OF_ANO)]

    for found in trainings:
        assert_equal_trainings(found, expected, config)
    return expected


def assert_equal_trainings(found: Trained, expected: Trained, config: Configuration) -> None:
    far = too_different(found, expected)
    if far:  # in some configurations rounding errors grow: PPO is as far from itself there
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rounded = [Trained(PPO, config, rounding=seed) for seed in range(4)]
        of_rounding = [too_different(changed, expected) for changed in rounded]
        for name, excess in far.items():
            assert excess <= 4.0 * max(each.get(name, 1.0) for each in of_rounding), (name, excess, of_rounding)
    assert found.model._n_updates == expected.model._n_updates
    assert found.model.num_timesteps == expected.model.num_timesteps


@contextlib.contextmanager
def traced_only() -> Iterator[list[dict[str, Any]]]:
    """Trace as the compiler would, without a graph break, but run what was traced without compiling it.

    Yields a list, to which each graph adds the options that were given for it.
    """
    graphs: list[dict[str, Any]] = []
    compile_it = torch.compile

    def trace(function: Any, fullgraph: bool, dynamic: bool, options: dict[str, Any]) -> Any:
        assert fullgraph

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(options)
            return graph.forward

        return compile_it(function, fullgraph=fullgraph, dynamic=dynamic, backend=backend)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch, "compile", trace)
        yield graphs


def with_some_seed(check: Callable[[int], None]) -> None:
    """Run a check with up to five seeds, until it succeeds.

    Depending on the processor, some seeds have a sample that rounding moves across the edge of the region, where PPO's
    gradient jumps. A wrong computation differs with nearly every seed.
    """
    for seed in range(3, 7):
        with contextlib.suppress(AssertionError):
            return check(seed)
    return check(7)


def relative_difference(one: Any, other: Any) -> float:
    """Distance of the parameters of two models, relative to those of the first."""
    return ((parameters(one) - parameters(other)).norm() / parameters(one).norm()).item()
