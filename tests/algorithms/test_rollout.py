"""The collection against SB3's, and the check for NaN and Inf."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

from sb3_ano import ANO
from sb3_ano.fast.step import rollout_tensors
from tests.algorithms.configurations import Callback
from tests.common import parameters
from tests.tiny_envs import (
    BOX_ACTIONS,
    BOX_OBSERVATIONS,
    DICT_OBSERVATIONS,
    TinyEnv,
    tiny_vec_env,
    vec_env_with_bad_number,
)

# Policies, optimizers and buffers of these tests are custom ones.
pytestmark = pytest.mark.filterwarnings("ignore:this training leaves the fast path")

SETTINGS = {"n_steps": 32, "batch_size": 32, "n_epochs": 1, "seed": 0, "device": "cpu"}
NAN, INF = math.nan, math.inf


def train(env, policy: str = "MlpPolicy", cls: type = ANO, callback=None, **options):
    return cls(policy, env, **{**SETTINGS, **options}).learn(3 * 32 * env.num_envs, callback=callback)


def plain(actions: spaces.Space | None = None, n_envs: int = 2):
    return tiny_vec_env(BOX_OBSERVATIONS, actions or spaces.Discrete(2), n_envs)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("actions", [spaces.Discrete(5), spaces.MultiDiscrete([3, 4]), BOX_ACTIONS])
def test_policies_of_images_act_as_the_policy_does(actions, precision, tolerance):
    env = tiny_vec_env(spaces.Box(0, 255, (36, 36, 3), np.uint8), actions, 3)
    model = ANO("CnnPolicy", env, precision=precision, **SETTINGS)
    observations = env.reset().transpose(0, 3, 1, 2)
    for head in (model.policy.action_net, torch.nn.Sequential(model.policy.action_net)):
        model.policy.action_net = head
        actor = model.engine.make_actor(model, model.engine_options())
        torch.manual_seed(1)
        acted = actor(observations)
        torch.manual_seed(1)
        expected = model.policy(torch.as_tensor(observations))
        for ours, theirs in zip(acted, expected, strict=True):
            np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=tolerance)
    values = actor.terminal_values(list(observations), [0, 1, 2])
    np.testing.assert_allclose(values, expected[1].detach().numpy()[:, 0], atol=tolerance)
    buffer = model.rollout_buffer
    rollouts = []
    model.learn(96, callback=Callback(after=lambda model: rollouts.append(buffer.observations.copy())))
    images = buffer.swap_and_flatten(rollouts[-1])
    for turned in (True, False):
        buffer.observations = rollouts[-1]
        buffer.generator_ready = False
        samples = rollout_tensors(buffer, turned, with_td_errors=False)
        np.testing.assert_array_equal(samples.observations, images)
        assert samples.observations.is_contiguous(memory_format=torch.channels_last) == turned


@pytest.mark.parametrize("wrap", [lambda env: env, VecNormalize], ids=["plain", "normalized"])
@pytest.mark.filterwarnings("ignore:invalid value")  # of SB3's running statistics
@pytest.mark.parametrize(("number", "at"), [(NAN, 3), (INF, 40), (-INF, 33), (NAN, 32)])
@pytest.mark.parametrize("what", ["reward", "observation"])
def test_the_environment_and_the_step_are_named(what, number, at, wrap):
    env = wrap(vec_env_with_bad_number(2, what, number, at))
    place = "reward" if what == "reward" else r"observation\[1\]"
    with pytest.raises(ValueError, match=f"environment 2 returned {number} in its {place} at step {at} of the training"):
        train(env)
    if isinstance(env, VecNormalize):  # it would spread the number over the statistics of all environments
        assert all(np.isfinite(each).all() for each in (env.obs_rms.mean, env.ret_rms.var, env.returns))


def bad_reset():
    return vec_env_with_bad_number(2, "observation", NAN, 0)


def bad_end(number: float):
    return vec_env_with_bad_number(3, "observation", number, TinyEnv.length)


@pytest.mark.parametrize(
    ("env", "place"),
    [
        (bad_reset, r"2 returned nan in its observation\[1\] at step 0"),
        (lambda: vec_env_with_bad_number(0, "reward", NAN, 1, wrap=VecNormalize), "0 returned nan in its reward at step 1"),
        (lambda: VecNormalize(bad_reset()), r"2 returned nan in its observation\[1\] at step 0"),
        (lambda: bad_end(INF), r"3 returned inf in its terminal observation\[1\] at step 15"),
        (lambda: VecNormalize(bad_end(NAN)), r"3 returned nan in its terminal observation\[1\] at step 15"),
        # Fixed statistics make a finite number of Inf.
        (lambda: VecNormalize(vec_env_with_bad_number(2, "observation", INF, 5), training=False), "2 returned inf .* step 5"),
        (
            lambda: vec_env_with_bad_number(1, "observation", NAN, 7, observation_space=DICT_OBSERVATIONS),
            r"1 returned nan in its observation 'place'\[1\] at step 7",
        ),
    ],
)
def test_every_place_is_looked_at(env, place):
    made = env()
    with pytest.raises(ValueError, match=f"environment {place} of the training"):
        train(made, "MultiInputPolicy" if made.observation_space == DICT_OBSERVATIONS else "MlpPolicy")


class Forgiving(FlattenExtractor):
    """Replaces NaN and Inf by numbers."""

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(super().forward(observations), nan=0.0, posinf=10.0, neginf=-10.0)


def test_the_check_can_be_switched_off(tmp_path):
    def run(cls, **options):
        tiny = TinyEnv(copy.deepcopy(BOX_OBSERVATIONS), spaces.Discrete(2))
        hidden = TransformObservation(tiny, lambda o: np.where(o[0] < 0.0, np.float32(NAN), o), tiny.observation_space)
        return train(DummyVecEnv([lambda: hidden]), cls=cls, policy_kwargs={"features_extractor_class": Forgiving}, **options)

    with pytest.raises(ValueError, match="environment 0 returned nan .* or check_finite=False leaves them to the policy"):
        run(ANO)
    model = run(ANO, shaping="ppo", check_finite=False)
    assert np.isnan(model.rollout_buffer.observations).any()
    assert model.n_skipped_minibatches == 0
    assert torch.allclose(parameters(model), parameters(run(PPO)), rtol=1e-5, atol=1e-7)
    model.save(tmp_path / "unchecked")
    assert ANO.load(tmp_path / "unchecked").check_finite is False


def test_statistics_are_put_back_to_where_the_rollout_started():
    env = VecNormalize(vec_env_with_bad_number(0, "observation", NAN, 5))
    resuming = Callback(before=lambda model: setattr(env.obs_rms, "mean", np.full(4, 7.0)))
    with pytest.raises(ValueError, match="returned nan"):
        train(env, callback=resuming)
    np.testing.assert_array_equal(env.obs_rms.mean, 7.0)


def test_statistics_are_put_back_if_a_reset_returns_a_bad_number():
    bad: list[bool] = []
    tiny = TinyEnv(BOX_OBSERVATIONS, spaces.Discrete(2))
    env = VecNormalize(
        DummyVecEnv([lambda: TransformObservation(tiny, lambda o: o * NAN if bad else o, tiny.observation_space)])
    )
    model = train(env)
    before = [env.obs_rms.mean.copy(), env.obs_rms.count, env.ret_rms.count]
    bad.append(True)
    with pytest.raises(ValueError, match=r"environment 0 returned nan in its observation\["):
        model.learn(64)
    np.testing.assert_array_equal(env.obs_rms.mean, before[0])
    assert [env.obs_rms.count, env.ret_rms.count] == before[1:]
    bad.clear()
    model.learn(64)


@pytest.mark.parametrize("actions", [BOX_ACTIONS, spaces.Discrete(2)], ids=str)
def test_an_unchecked_number_ends_at_the_policy_before_it_acts(actions):
    """As in SB3, where a distribution of NaN is an error."""
    steps = itertools.count()
    tiny = TinyEnv(BOX_OBSERVATIONS, actions)
    env = TransformObservation(tiny, lambda o: o * NAN if next(steps) == 5 else o, tiny.observation_space)
    with pytest.raises(ValueError, match="the policy returned NaN or Inf"):
        train(DummyVecEnv([lambda: env]), check_finite=False)
    assert next(steps) == 6  # no step after it


@pytest.mark.parametrize("actions", [BOX_ACTIONS, spaces.Discrete(3), spaces.MultiDiscrete([2, 3])], ids=str)
def test_a_policy_that_is_not_a_number_is_named_and_not_the_environment(actions):
    model = ANO("MlpPolicy", plain(actions=actions), **SETTINGS)
    with torch.no_grad():
        model.policy.action_net.bias.fill_(NAN)
    with pytest.raises(
        ValueError,
        match=r"the policy returned NaN or Inf at step 0 of the training; look at its parameters: policy.action_net.bias",
    ):
        model.learn(64)


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_outside_of_its_space_is_an_error(index):
    tiny = TinyEnv(spaces.Discrete(5), BOX_ACTIONS)
    with pytest.raises(IndexError, match="out of bounds"):
        train(DummyVecEnv([lambda: TransformObservation(tiny, lambda o: index, tiny.observation_space)]))


def test_a_number_whose_square_overflows_is_finite():
    model = ANO("MlpPolicy", vec_env_with_bad_number(1, "reward", 1e30, 3), **SETTINGS)
    model.train = lambda: None
    assert model.learn(64).rollout_buffer.rewards.max() == np.float32(1e30)


def numbers(variables: dict) -> dict:
    """The types of variables, and copies of arrays and tensors."""
    kinds = np.ndarray | torch.Tensor
    return {name: (type(v), np.asarray(v).copy() if isinstance(v, kinds) else None) for name, v in variables.items()}


# Left over from SB3's loop over truncated environments.
LOOP_VARIABLES = {"idx", "done", "terminal_obs", "terminal_value"}


@pytest.mark.parametrize(
    ("observations", "actions"),
    [(BOX_OBSERVATIONS, BOX_ACTIONS), (BOX_OBSERVATIONS, spaces.Discrete(3)), (DICT_OBSERVATIONS, spaces.MultiBinary(2))],
    ids=["Box", "Discrete", "Dict"],
)
def test_callbacks_find_the_same_local_variables_as_in_sb3(observations, actions):
    policy = "MultiInputPolicy" if observations is DICT_OBSERVATIONS else "MlpPolicy"
    seen: dict[type, list[dict]] = {ANO: [], PPO: []}
    for cls, steps in seen.items():
        record = lambda variables, _, steps=steps: steps.append(numbers(variables)) or True  # noqa: E731
        train(tiny_vec_env(observations, actions), policy, cls, record, n_steps=96)
    for mine, theirs in zip(*seen.values(), strict=True):
        for name in theirs.keys() - LOOP_VARIABLES - {"self", "rollout_buffer"}:
            assert mine[name][0] is theirs[name][0], name
            if theirs[name][1] is not None and theirs[name][1].dtype.kind in "fiub":
                np.testing.assert_allclose(mine[name][1], theirs[name][1], rtol=1e-5, atol=1e-6, err_msg=name)


def other_policy(model):
    policy = model.policy
    model.policy = model.policy_class(model.observation_space, model.action_space, model.lr_schedule, **model.policy_kwargs)
    model.policy.load_state_dict(policy.state_dict())
    model.policy.action_net.bias.data[0] += 5.0


CHANGES_OF_A_ROLLOUT = {
    "another policy": (nn.Identity, other_policy),
    "training mode": (lambda: nn.Dropout(0.5), lambda model: model.policy.set_training_mode(True)),
    "statistics": (lambda: nn.BatchNorm1d(64), lambda model: model.policy.mlp_extractor.policy_net[-1].running_mean.add_(3.0)),
    "an attribute": (nn.LeakyReLU, lambda model: setattr(model.policy.mlp_extractor.policy_net[-1], "negative_slope", -9.0)),
}


@pytest.mark.parametrize("list_class", [list, type("Own", (CallbackList,), {})])
@pytest.mark.parametrize("change", CHANGES_OF_A_ROLLOUT)
def test_a_callbacks_change_of_the_policy_acts_within_the_rollout(change, list_class):
    layer, act = CHANGES_OF_A_ROLLOUT[change]

    def rollout(cls, callback):
        model = cls("MlpPolicy", plain(), **SETTINGS)
        model.policy.mlp_extractor.policy_net.append(layer())
        model.train = lambda: None
        return model.learn(64, callback=callback).rollout_buffer.log_probs

    expected, unchanged, found = (
        rollout(PPO, list_class([Callback(act)])),
        rollout(ANO, None),
        rollout(ANO, list_class([Callback(act)])),
    )
    assert np.abs(expected - unchanged).max() > 1e-3
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_list_of_callbacks_may_act_itself():
    def seen(cls):
        rewards = []
        act = lambda own: rewards.append(own.locals["rewards"].copy()) or CallbackList._on_step(own)  # noqa: E731
        train(plain(), cls=cls, callback=type("Own", (CallbackList,), {"_on_step": act})([]))
        return rewards

    np.testing.assert_allclose(seen(ANO), seen(PPO), rtol=1e-6)


def test_a_running_environment_may_be_normalized_later():
    def run(cls):
        env = plain()
        model = train(env, cls=cls)
        model.set_env(VecNormalize(env), force_reset=False)
        return parameters(model.learn(64, reset_num_timesteps=False))

    torch.testing.assert_close(
        run(lambda *args, **options: ANO(*args, shaping="ppo", **options)), run(PPO), rtol=1e-5, atol=1e-7
    )


def test_sizes_may_be_integers_of_numpy():
    assert train(plain(), batch_size=np.int64(32), n_steps=np.int64(32)).num_timesteps == 192


@pytest.mark.parametrize("method", ["add", "_get_samples", "get"])
def test_methods_that_a_users_buffer_overrides_are_called(method):
    base = type(ANO("MlpPolicy", plain(actions=BOX_ACTIONS), **SETTINGS).rollout_buffer)
    original, calls = getattr(base, method), []

    def counting(self, *args, **kwargs):
        calls.append(1)
        return original(self, *args, **kwargs)

    model = train(plain(actions=BOX_ACTIONS), rollout_buffer_class=type("Own", (base,), {method: counting}))
    assert len(calls) == {"add": 96, "_get_samples": 6, "get": 3}[method]
    torch.testing.assert_close(parameters(model), parameters(train(plain(actions=BOX_ACTIONS))))


def test_a_rollout_that_is_not_full_is_not_trained_on():
    model = train(plain())
    assert [len(minibatch.advantages) for minibatch in model.rollout_buffer.get()] == [64]
    kept = model.rollout_buffer.advantages
    copied = kept.copy()
    model.rollout_buffer.reset()
    np.testing.assert_array_equal(kept, copied)  # what a callback keeps is not overwritten, as in SB3
    with pytest.raises(ValueError, match="the rollout buffer holds 0 of 32 steps; collect a whole rollout first"):
        model.train()


@pytest.mark.parametrize(("observations", "n_envs"), [(BOX_OBSERVATIONS, 3), (BOX_OBSERVATIONS, 1), (DICT_OBSERVATIONS, 3)])
def test_after_a_training_the_buffer_has_the_arrays_of_sb3(observations, n_envs):
    policy = "MultiInputPolicy" if observations is DICT_OBSERVATIONS else "MlpPolicy"

    def arrays(cls: type, **options) -> dict:
        buffer = train(tiny_vec_env(observations, BOX_ACTIONS, n_envs), policy, cls, **options).rollout_buffer
        found = dict(buffer.observations) if isinstance(buffer.observations, dict) else {"observations": buffer.observations}
        return {name: array for name, array in {**vars(buffer), **found}.items() if isinstance(array, np.ndarray)}

    expected = arrays(PPO)
    found = arrays(ANO, shaping="ppo")
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-4, err_msg=name)


def test_the_update_reads_the_arrays_of_the_buffer_itself():
    buffer = train(tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS)).rollout_buffer
    samples = rollout_tensors(buffer, channels_last=False, with_td_errors=False)
    if buffer.device.type == "cpu":
        assert samples.observations.data_ptr() == buffer.observations.ctypes.data
    rows = torch.cat([minibatch.observations for minibatch in buffer.get(7)])
    torch.testing.assert_close(rows.sort(dim=0)[0], samples.observations.sort(dim=0)[0])


WIDE = spaces.Box(-np.inf, np.inf, (2, 3), np.float64)
STEEP = {"policy_kwargs": {"activation_fn": nn.ReLU}}


def with_one_number(number: float, at: int, key: str = "", actions: spaces.Space = BOX_ACTIONS):
    """Three environments, of which the last one returns ``number`` at step ``at``."""
    steps = itertools.count()

    def spoil(observation):
        if next(steps) == at:
            (observation[key] if key else observation)[1, 2] = number
        return observation

    space = spaces.Dict({"place": WIDE}) if key else WIDE
    plain = (
        spaces.Dict({"place": spaces.Box(-1.0, 1.0, (2, 3), np.float64)}) if key else spaces.Box(-1.0, 1.0, (2, 3), np.float64)
    )

    def make(spoiled: bool):
        def wrapped():
            tiny = TinyEnv(copy.deepcopy(plain), actions)
            return TransformObservation(tiny, spoil if spoiled else lambda o: o, space)

        return wrapped

    return DummyVecEnv([make(False), make(False), make(True)])


@pytest.mark.parametrize(("key", "name"), [("", "observation"), ("place", "observation 'place'")])
@pytest.mark.parametrize("at", [0, 3, TinyEnv.length])
def test_a_number_that_float32_cannot_hold_is_named(at, key, name):
    kind = f"terminal {name}" if at == TinyEnv.length else name
    message = (
        rf"environment 2 returned 1e\+300 in its {kind}\[1, 2\] at step {at} of the training, which is Inf in the policy's"
    )
    with pytest.raises(ValueError, match=message):
        train(with_one_number(1e300, at, key), "MultiInputPolicy" if key else "MlpPolicy")


@pytest.mark.parametrize("actions", [BOX_ACTIONS, spaces.Discrete(3), spaces.MultiBinary(2)], ids=str)
def test_an_unchecked_observation_that_breaks_the_policy_is_named(actions):
    env = with_one_number(NAN, 3, actions=actions)
    message = r"NaN or Inf at step 3 of the training, because environment 2 returned nan in its observation\[1, 2\]; scale or"
    with pytest.raises(ValueError, match=message):
        train(env, check_finite=False)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_parameter_that_breaks_the_policy_is_named():
    model = ANO("MlpPolicy", plain(actions=BOX_ACTIONS), **SETTINGS)
    with torch.no_grad():
        model.policy.log_std.fill_(100.0)
    with pytest.raises(ValueError, match="look at its parameters: the largest is 100 in policy.log_std"):
        model.learn(64)
