"""ANO on RLlib: the learner against RLlib's PPO, the settings, and the way to Stable-Baselines3."""

import re

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_ano import ANO
from sb3_ano.shaping import ano
from tests.tiny_envs import BOX_OBSERVATIONS, TinyEnv

ray = pytest.importorskip("ray")
pytest.importorskip("ray.rllib", exc_type=ImportError)

from ray.rllib.algorithms.ppo import PPOConfig  # noqa: E402
from ray.rllib.connectors.connector_v2 import ConnectorV2  # noqa: E402
from ray.rllib.connectors.env_to_module import FlattenObservations, MeanStdFilter  # noqa: E402
from ray.rllib.core.columns import Columns  # noqa: E402
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig  # noqa: E402

from sb3_ano.rllib import ANOConfig, to_sb3  # noqa: E402

# RLlib warns of its own code.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning")

ACTIONS = {"Discrete": spaces.Discrete(4), "Box": spaces.Box(-2.0, 2.0, (3,)), "MultiDiscrete": spaces.MultiDiscrete([3, 2])}
ROWS, STEPS = 12, 7


class Spaces(TinyEnv):
    def __init__(self, config):
        super().__init__(BOX_OBSERVATIONS, config["actions"])


def learner_of(cls, actions, lstm=False, **training):
    settings = {"clip_param": 0.2, "use_kl_loss": False, "entropy_coeff": 0.01, **training}
    model = DefaultModelConfig(fcnet_hiddens=[16], use_lstm=lstm, lstm_cell_size=8, max_seq_len=STEPS)
    config = cls().environment(Spaces, env_config={"actions": actions}).rl_module(model_config=model).training(**settings)
    torch.manual_seed(0)
    return config.build_learner(env=Spaces({"actions": actions}))


def batch_of(learner, actions, lstm):
    torch.manual_seed(1)
    shape = (ROWS, STEPS) if lstm else (ROWS * STEPS,)
    flat = np.stack([actions.sample() for _ in range(ROWS * STEPS)])
    tensors = {Columns.OBS: torch.randn(*shape, 4), Columns.LOSS_MASK: torch.rand(shape) < 0.8}
    tensors |= {name: torch.randn(shape) for name in ("advantages", "value_targets")}
    tensors[Columns.ACTIONS] = torch.as_tensor(flat.reshape(*shape, *flat.shape[1:]))
    module = learner.module["default_policy"].unwrapped()
    if lstm:
        tensors[Columns.STATE_IN] = {name: torch.zeros(ROWS, *part.shape) for name, part in module.get_initial_state().items()}
    with torch.no_grad():
        inputs = module.forward_train(tensors)[Columns.ACTION_DIST_INPUTS]
        tensors[Columns.ACTION_DIST_INPUTS] = inputs
        log_prob = module.get_train_action_dist_cls().from_logits(inputs).logp(tensors[Columns.ACTIONS])
        # Ratios on both sides of the region.
        tensors[Columns.ACTION_LOGP] = log_prob + 0.3 * torch.randn(shape)
    return tensors


def loss_and_gradient(learner, batch):
    module = learner.module["default_policy"].unwrapped()
    config = learner.config.get_config_for_module("default_policy")
    module.zero_grad()
    loss = learner.compute_loss_for_module(
        module_id="default_policy", config=config, batch=dict(batch), fwd_out=module.forward_train(dict(batch))
    )
    loss.backward()
    gradients = [parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None]
    return loss.item(), torch.cat(gradients)


@pytest.mark.parametrize("lstm", [False, True], ids=["mlp", "lstm"])
@pytest.mark.parametrize("actions", ACTIONS)
def test_loss_and_gradient_equal_those_of_rllibs_ppo_and_stay_finite(actions, lstm):
    space = ACTIONS[actions]
    space.seed(0)
    expected_learner = learner_of(PPOConfig, space, lstm)
    batch = batch_of(expected_learner, space, lstm)
    expected, gradient = loss_and_gradient(expected_learner, batch)

    def deviation(**training):
        loss, own = loss_and_gradient(learner_of(ANOConfig, space, lstm, **training), batch)
        return max(abs(loss - expected) / abs(expected), float((own - gradient).norm() / gradient.norm()))

    assert deviation(shaping="ppo") < 1e-6
    assert deviation(shaping="ppo", use_kl_loss=True, kl_coeff=0.0) < 1e-6
    assert deviation(shaping="ppo", clip_param=0.201) > 1e-4
    assert deviation(shaping="ano") > 1e-3
    batch[Columns.ACTION_LOGP].view(-1)[:8] -= torch.tensor([1e3, -1e3, 200.0, -200.0]).repeat(2)
    for shaping in ("ano", "cispo", "dppo"):  # a weight, and a radius that depends on the old log-probabilities
        loss, gradient = loss_and_gradient(learner_of(ANOConfig, space, lstm, shaping=shaping), batch)
        assert np.isfinite(loss)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shaping": "anno"}, "shaping='anno' is unknown"),
        ({"shaping": lambda x: ano(x)}, "cannot be imported by its name"),
        ({"shaping": torch.sigmoid}, "h(0)"),
        ({"clip_param": 0.0}, "clip_param=0.0 is not allowed"),
        ({"clip_param": None}, "clip_param=None is not allowed"),
        ({"clip_param": [[5, 0.2], [10, 0.1]]}, "first timestep must be 0"),
        ({"clip_range_high": -0.1}, "clip_range_high=-0.1 is not allowed"),
        ({"desired_kl": float("nan")}, "desired_kl=nan is not allowed"),
        ({"desired_kl": 0.01, "clip_param": [[0, 0.2], [10, 0.1]]}, "clip_param is a schedule"),
        ({"desired_kl": 0.01, "clip_range_high": [[0, 0.2], [10, 0.1]]}, "clip_range_high is a schedule"),
        ({"enable_rl_module_and_learner": False}, "old API stack is not supported"),
    ],
)
def test_invalid_settings_are_one_clear_error(settings, message):
    config = ANOConfig().environment("CartPole-v1")
    vars(config).update(settings)
    with pytest.raises(ValueError, match=re.escape(message)):
        config.validate()


@pytest.fixture(scope="module")
def running_ray():
    ray.init(num_cpus=2, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture
def train(running_ray):
    """Train algorithms, and stop them at the end."""
    algorithms = []

    def make(env, iterations=2, cls=ANOConfig, model=None, connector=None, environment=None, learners=0, **training):
        settings = {"train_batch_size_per_learner": 256, "minibatch_size": 64, "num_epochs": 4, "lr": 3e-3, "clip_param": 0.2}
        config = cls().environment(env, **(environment or {}))
        config.env_runners(num_env_runners=0, env_to_module_connector=connector and (lambda *_, **__: connector()))
        networks = {"fcnet_hiddens": [32, 32], "free_log_std": env == "Pendulum-v1", **(model or {})}
        config.rl_module(model_config=DefaultModelConfig(**networks)).learners(num_learners=learners)
        config.training(**{**settings, **training}).debugging(seed=3, log_level="ERROR")
        algorithms.append(algorithm := config.build_algo())
        for _ in range(iterations):
            algorithm.train()
        return algorithm

    yield make
    for algorithm in algorithms:
        algorithm.stop()


def flat(weights):
    return np.concatenate([np.ravel(weights[name]) for name in sorted(weights)])


def parameters(algorithm):
    return flat(algorithm.learner_group.get_weights()["default_policy"])


@pytest.mark.slow
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_three_iterations_equal_rllibs_ppo(train, env):
    expected = parameters(train(env, 3, PPOConfig, use_kl_loss=False))

    def deviation(**training):
        return np.linalg.norm(parameters(train(env, 3, **training)) - expected) / np.linalg.norm(expected)

    assert deviation(shaping="ppo") < 1e-5
    assert deviation(shaping="ppo", clip_param=0.15) > 1e-4


@pytest.mark.slow
def test_radius_is_scheduled_adapted_and_restored(train, tmp_path):
    metrics = train("CartPole-v1", 1, clip_param=[[0, 0.4], [1024, 0.1]]).train()["learners"]["default_policy"]
    assert metrics["clip_range"] == pytest.approx(0.4 - 0.3 * 512 / 1024, abs=0.02)
    adapted, fresh = (train("CartPole-v1", iterations, desired_kl=0.5, clip_range_high=0.3) for iterations in (3, 0))
    factor = adapted.learner_group._learner._region("default_policy").factor
    assert factor == pytest.approx(1.25**3)  # the KL is far below its target
    fresh.restore_from_path(adapted.save_to_path(str(tmp_path / "checkpoint")))
    assert fresh.learner_group._learner._region("default_policy").factor == factor


@pytest.mark.slow
def test_learners_agree_bit_for_bit(train):
    algorithm = train("CartPole-v1", 3, learners=2, desired_kl=0.003)

    def state(learner):
        return learner._region("default_policy").factor, flat(learner.module["default_policy"].get_state())

    first, second = algorithm.learner_group.foreach_learner(state)
    assert first.get()[0] == second.get()[0] != 1.0
    np.testing.assert_array_equal(first.get()[1], second.get()[1])


CONVERSIONS = {
    "Discrete": ("CartPole-v1", {}, None, {}),
    "Box, bounds beyond 1": ("Pendulum-v1", {}, None, {}),
    "actions not normalized": ("Pendulum-v1", {}, None, {"normalize_actions": False}),
    "shared layers": ("Pendulum-v1", {"vf_share_layers": True, "fcnet_activation": "relu"}, None, {}),
    "hidden layers in the heads": ("CartPole-v1", {"head_fcnet_hiddens": [8], "head_fcnet_activation": "tanh"}, None, {}),
    "MultiDiscrete": (Spaces, {}, None, {"env_config": {"actions": ACTIONS["MultiDiscrete"]}}),
    "filter": ("Pendulum-v1", {}, MeanStdFilter, {}),
    "filter, mean kept": ("Pendulum-v1", {}, lambda: MeanStdFilter(de_mean_to_zero=False), {}),
    "filter, deviation kept": ("Pendulum-v1", {}, lambda: MeanStdFilter(de_std_to_one=False), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CONVERSIONS)
def test_agents_act_and_value_in_sb3_as_in_rllib(train, case, tmp_path):
    env, model, connector, environment = CONVERSIONS[case]
    algorithm = train(env, model=model, connector=connector, environment=environment)
    agent = to_sb3(algorithm)
    assert isinstance(agent, ANO)
    observations = np.stack([agent.observation_space.sample() for _ in range(1000)]).clip(-8.0, 8.0)
    learner = algorithm.learner_group._learner.module["default_policy"].unwrapped()
    inputs, normalize = observations, agent.get_vec_normalize_env()
    assert (normalize is not None) == ("filter" in case)
    if normalize is not None:
        (connector,) = (piece for piece in algorithm.env_runner._env_to_module.connectors if type(piece) is MeanStdFilter)
        inputs = np.stack([connector._filters[None](row, update=False) for row in observations])
        observations = normalize.normalize_obs(observations)
    with torch.no_grad():
        batch = {Columns.OBS: torch.as_tensor(inputs)}
        outputs = learner.forward_inference(batch)[Columns.ACTION_DIST_INPUTS]
        mode = learner.get_inference_action_dist_cls().from_logits(outputs).to_deterministic().sample().numpy()
        expected_values = learner.compute_values(batch).numpy()
        values = agent.policy.predict_values(torch.as_tensor(observations, device=agent.device)).cpu().numpy()[:, 0]
    actions, _ = agent.predict(observations, deterministic=True)
    space = agent.action_space
    if isinstance(space, spaces.Box):
        if algorithm.config.normalize_actions:
            mode = space.low + (mode + 1.0) * (space.high - space.low) / 2.0
        mode = mode.clip(space.low, space.high)
    # Observations whose mean is kept are larger, and so are their rounding errors.
    np.testing.assert_allclose(actions, mode, rtol=1e-6, atol=4e-6 if "kept" in case else 2e-6)
    np.testing.assert_allclose(values, expected_values, rtol=1e-5, atol=2e-6)
    if case == "Discrete":
        again = to_sb3(algorithm.save_to_path(str(tmp_path / "checkpoint")))
        np.testing.assert_array_equal(again.predict(observations, deterministic=True)[0], actions)
        again.save(tmp_path / "agent")
        assert ANO.load(tmp_path / "agent").num_timesteps == agent.num_timesteps >= 512
        assert evaluate_policy(again, again.get_env(), n_eval_episodes=1)[0] > 0.0


@pytest.mark.slow
def test_rllibs_defaults_are_converted(running_ray):
    config = ANOConfig().environment("CartPole-v1").env_runners(num_env_runners=0)
    assert type(config.algo_class.get_default_config()) is ANOConfig  # as Ray Tune finds the settings
    algorithm = config.training(clip_range_high=0.4, desired_kl=[[0, 0.02], [10, 0.01]], grad_clip=0.7).build_algo()
    agent = to_sb3(algorithm)
    assert (agent.clip_range_high(1.0), agent.desired_kl(1.0), agent.max_grad_norm) == (0.4, 0.02, 0.7)
    algorithm.stop()
    assert agent.policy.net_arch == {"pi": [256, 256], "vf": [256, 256]}
    assert agent.policy.activation_fn is torch.nn.Tanh


REJECTED = {
    "standard deviations": ("Pendulum-v1", {"free_log_std": False}, None, "free_log_std=True"),
    "normalization": ("CartPole-v1", {"fcnet_use_layernorm": True}, None, "encoder.net.mlp"),
    "LSTM": ("CartPole-v1", {"use_lstm": True}, None, "RLlib's"),
    "activations": ("CartPole-v1", {"head_fcnet_hiddens": [8]}, None, "has the activations relu, tanh"),
    "connector": ("CartPole-v1", {}, FlattenObservations, "FlattenObservations"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REJECTED)
def test_what_sb3_cannot_express_is_named(train, case):
    env, model, connector, message = REJECTED[case]
    algorithm = train(env, 0, model=model, connector=connector)
    with pytest.raises(ValueError, match=f"^.*{message}.*$"):
        to_sb3(algorithm)


class Flip(ConnectorV2):
    """Take the other one of two actions."""

    def __call__(self, *, batch, **_):
        return {**batch, Columns.ACTIONS: 1 - batch[Columns.ACTIONS]}


@pytest.mark.slow
def test_a_connector_that_changes_actions_is_named(running_ray):
    config = ANOConfig().environment("CartPole-v1").debugging(log_level="ERROR")
    algorithm = config.env_runners(num_env_runners=0, module_to_env_connector=lambda *_, **__: Flip()).build_algo()
    with pytest.raises(ValueError, match="^RLlib's connector Flip has no counterpart"):
        to_sb3(algorithm)
    algorithm.stop()
