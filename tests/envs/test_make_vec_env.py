"""Ids and arguments of make_env and make_vec_env: which environments they give."""

import gc
import inspect
import os
import sys
import warnings

import gymnasium as gym
import gymnasium.envs.mujoco
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import PendulumEnv
from stable_baselines3.common import env_util
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.monitor import load_results
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecNormalize

from sb3_ano import ANO
from sb3_ano._system import cores
from sb3_ano.envs import DirectVecEnv, make_env, make_vec_env, vec_env
from sb3_ano.envs.atari import AtariProtocol, atari_protocol
from tests.envs.backends import RandomPolicy, needs_all

pytestmark = needs_all
every_backend = pytest.mark.parametrize("backend", ["gymnasium", "envpool", "ale"])


def kind(env_id: str, **kwargs) -> str:
    """Return the name of the class of environments that ``"auto"`` selects."""
    env = make_vec_env(env_id, **{"n_envs": 2, **kwargs})
    env.close()
    return type(env.unwrapped).__name__


@pytest.mark.parametrize(
    ("env_id", "arguments", "expected"),
    [
        *((env_id, {}, "EnvPoolVecEnv") for env_id in ("HalfCheetah-v4", "Hopper-v5", "Pong-v5", "PongNoFrameskip-v4")),
        *((env_id, {}, "EnvPoolVecEnv") for env_id in ("ALE/Pong-v5", "Pendulum-v0")),
        ("HalfCheetah-v4", {"n_envs": 1}, "DirectVecEnv"),
        ("Hopper-v5", {"wrapper_class": gym.wrappers.ClipAction}, "DirectVecEnv"),
        ("Hopper-v5", {"monitor_kwargs": {"info_keywords": ("x_position",)}}, "DirectVecEnv"),
        ("Hopper-v5", {"env_kwargs": {"healthy_z_range": (0.5, 2.0)}}, "DirectVecEnv"),
        ("Hopper-v5", {"env_kwargs": {"terminate_when_unhealthy": False}}, "EnvPoolVecEnv"),
        ("Hopper-v5", {"env_kwargs": {"render_mode": "rgb_array"}}, "DirectVecEnv"),
        ("Hopper-v5", {"env_kwargs": {"xml_file": f"{gymnasium.envs.mujoco.__path__[0]}/assets/hopper.xml"}}, "DirectVecEnv"),
        *(("Hopper-v5", {"env_kwargs": {"max_episode_steps": steps}}, "DirectVecEnv") for steps in (-1, None)),
        ("Pong-v5", {"env_kwargs": {"noop_max": 0}}, "AleVecEnv"),
        ("Pong-v5", {"env_kwargs": {"noop_max": 0, "mode": 0}}, "DirectVecEnv"),
        *((env_id, {}, "DirectVecEnv") for env_id in ("CartPole-v1", "Pendulum-v1")),  # would cost more, or differ
    ],
)
def test_auto_selects_envpool_where_it_is_faster_and_knows_the_arguments(env_id, arguments, expected):
    assert kind(env_id, **arguments) == expected


def test_auto_selects_what_is_installed(without):
    assert vec_env._fastest("LunarLander-v3", 8, None, {}) == "gymnasium"  # not made: Box2D warns when it is imported
    without("mujoco")
    assert kind("HalfCheetah-v4", n_envs=1) == "EnvPoolVecEnv"
    without("envpool")
    assert kind("Pong-v5") == "AleVecEnv"


@pytest.mark.parametrize("env_id", ["HalfCheetah-v3", "HumanoidStandup-v2", "Pusher-v4", "Reacher-v5", "Pendulum-v0"])
def test_the_number_of_environments_does_not_decide_whether_there_are_any(env_id):
    kinds = []
    for n_envs in (1, 2):
        env = make_vec_env(env_id, n_envs, seed=0)
        observations = env.reset()
        assert observations.shape == (n_envs, *env.observation_space.shape)
        kinds.append(env.backend)
        env.close()
    in_gymnasium = gym.registry.get(env_id) is not None and vec_env._gymnasium_makes(env_id)
    assert kinds == ["gymnasium" if in_gymnasium else "envpool", "envpool"]


def test_environments_that_gymnasium_no_longer_has_are_one_line_that_names_envpool():
    message = "env_id='HalfCheetah-v3' cannot be made by backend 'gymnasium': .*; backend 'envpool' has it"
    for arguments in ({"backend": "gymnasium"}, {"wrapper_class": gym.wrappers.ClipAction}):
        with pytest.raises(ValueError, match=message) as raised:
            make_vec_env("HalfCheetah-v3", **arguments)
        assert "\n" not in str(raised.value)
    with pytest.raises(
        ValueError, match="env_id='Pendulum-v0' cannot be made by backend 'gymnasium'.*; backend 'envpool' has it"
    ):
        make_vec_env("Pendulum-v0", monitor_kwargs={"allow_early_resets": False})
    for make in (lambda: make_env("HalfCheetah-v3"), lambda: ANO("MlpPolicy", "HalfCheetah-v3")):
        with pytest.raises(ValueError, match="env='HalfCheetah-v3' cannot be made: The mujoco v2 and v3"):
            make()


SEEDLESS = "racetrack-v0"


@pytest.mark.parametrize("n_envs", [1, 2])
def test_auto_takes_no_environments_that_ignore_seeds_and_envpool_takes_them_with_a_warning(n_envs):
    with pytest.raises(
        ValueError, match=f"env_id='{SEEDLESS}' is only known to EnvPool, .* whatever the seed; backend='envpool'"
    ):
        make_vec_env(SEEDLESS, n_envs, seed=0)
    env = make_vec_env(SEEDLESS, n_envs, seed=0, backend="envpool")
    with pytest.warns(UserWarning, match=f"EnvPool's {SEEDLESS} ignores seeds: all environments start in the same state"):
        observations = env.reset()
    for row in observations:
        np.testing.assert_array_equal(row, observations[0])
    env.reset()  # warns at the first reset after seed() alone
    env.close()


def test_environments_that_start_equal_by_a_setting_give_no_warning():
    env = make_vec_env("Hopper-v5", 2, seed=0, env_kwargs={"reset_noise_scale": 0.0})
    np.testing.assert_array_equal(*env.reset())
    env.close()


@pytest.mark.slow
def test_environments_that_auto_takes_without_a_trial_play_by_their_seeds():
    from sb3_ano.envs import envpool_backend

    tasks = [env_id for env_id in envpool_backend.registry.specs if envpool_backend.replaces_gymnasium(env_id)]
    tasks = [env_id for env_id in tasks if gym.registry.get(env_id) or env_id in ("Amidar-v5", "CrazyClimber-v5")]
    assert len(tasks) == 35
    equal = [env_id for env_id in tasks if envpool_backend._plays_equally(env_id, {})]
    assert equal == []


def test_an_atari_id_names_the_game_and_whether_actions_are_sticky():
    sticky = {"SpaceInvaders-v5": 0.0, "SpaceInvadersNoFrameskip-v4": 0.0, "SpaceInvadersNoFrameskip-v0": 0.25}
    for env_id, probability in {**sticky, "ALE/SpaceInvaders-v5": 0.25}.items():
        assert atari_protocol(env_id) == AtariProtocol("SpaceInvaders", probability, max_frames=108_000)
    assert not any(map(atari_protocol, ["Hopper-v5", "CartPole-v1", "ALE/Pong-ram-v5", "Pong-v4"]))


@every_backend
def test_the_id_or_a_setting_decides_about_sticky_actions(backend):
    def run(env_id: str, **settings) -> np.ndarray:
        env = make_vec_env(env_id, 1, backend=backend, seed=0, env_kwargs={"episodic_life": False, **settings})
        env.reset()
        seen = [env.step(np.array([2 + 3 * (step // 3 % 2) % 4]))[0] for step in range(40)]
        env.close()
        return np.stack(seen)

    plain, sticky = run("Pong-v5"), run("ALE/Pong-v5")
    assert (plain != sticky).any()
    np.testing.assert_array_equal(run("PongNoFrameskip-v4"), plain)
    np.testing.assert_array_equal(run("ALE/Pong-v5", repeat_action_probability=0.0), plain)
    np.testing.assert_array_equal(run("Pong-v5", repeat_action_probability=0.25), sticky)
    assert (run("Pong-v5", repeat_action_probability=1.0) != sticky).any()


@pytest.mark.slow
@pytest.mark.parametrize("game", ["MsPacman", "NameThisGame", "Qbert"])
def test_games_and_changes_of_the_protocol_are_the_same_everywhere(game):
    changes = {"frame_stack": 1, "screen_size": 42, "full_action_space": True, "frame_skip": 2, "noop_max": 1}
    for settings, shape in (({}, (4, 84, 84)), (changes, (1, 42, 42))):
        made = [make_vec_env(f"{game}-v5", 2, backend=name, env_kwargs=settings) for name in ("gymnasium", "envpool", "ale")]
        assert len({str(env.action_space) for env in made}) == 1
        for env in made:
            assert env.observation_space == gym.spaces.Box(0, 255, shape, np.uint8)
            assert env.reset().shape == (2, *shape)
            env.close()
    assert made[0].action_space == gym.spaces.Discrete(18)
    assert not isinstance(made[0], VecFrameStack)


def test_a_wrapper_replaces_the_atari_protocol():
    env = make_vec_env("PongNoFrameskip-v4", wrapper_class=AtariWrapper, wrapper_kwargs={"screen_size": 42})
    assert env.observation_space.shape == (42, 42, 1)
    env.close()


def test_environments_render_on_request():
    assert make_env("CartPole-v1").render_mode == "rgb_array"
    env = make_vec_env("CartPole-v1", 2, env_kwargs={"render_mode": "rgb_array"})
    env.reset()
    assert env.render_mode == "rgb_array"
    assert env.render().ndim == 3
    assert make_env("ALE/Pong-v5").observation_space.shape == (210, 160, 3)  # registered on demand
    env = make_vec_env("Pong-v5", 2, backend="envpool", env_kwargs={"render_mode": "rgb_array"})
    with pytest.raises(RuntimeError, match=r"call reset\(\) before rendering"):
        env.render()
    env.reset()
    assert [image.shape for image in env.get_images()] == [(210, 160, 3)] * 2
    assert env.render().ndim == 3
    env.close()


def test_lunar_lander_simulates_no_particles_unless_it_is_rendered():
    pytest.importorskip("Box2D")
    bodies, observations = [], []
    for settings in ({}, {"render_mode": "rgb_array"}):
        env = make_vec_env("LunarLanderContinuous-v3", 1, seed=0, env_kwargs=settings)
        env.reset()
        observations.append(np.array([env.step(np.ones((1, 2)))[0][0] for _ in range(40)]))
        bodies.append(len(env.get_attr("world")[0].bodies))
        env.close()
    assert bodies[0] == 4 < bodies[1]  # the moon, the lander and its legs
    np.testing.assert_array_equal(*observations)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(cores() != os.cpu_count(), reason="not all processors may be used")
def test_envpools_threads_are_pinned_only_if_there_is_one_per_processor():
    everywhere = os.sched_getaffinity(0)
    for num_threads in (max(1, len(everywhere) - 1), len(everywhere), len(everywhere) + 1):
        before = set(os.listdir("/proc/self/task"))
        env = make_vec_env("HalfCheetah-v4", len(everywhere) + 1, backend="envpool", num_threads=num_threads)
        env.reset()
        made = [os.sched_getaffinity(int(task)) for task in {*os.listdir("/proc/self/task")} - before]
        pinned = [allowed for allowed in made if len(allowed) == 1]
        assert set().union(*pinned) == (everywhere if num_threads == len(everywhere) else set())
        assert len(pinned) == len(set().union(*pinned))
        env.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(cores() == 1, reason="a thread that is left alone needs a processor")
def test_idle_threads_of_pytorch_end_if_the_environments_need_their_processors(request):
    request.addfinalizer(lambda: torch.set_num_threads(1))
    numbers, left = torch.rand(2**20), {}
    for num_threads, n_envs in ((cores() - 1, cores()), (cores(), cores())):
        env = make_vec_env("HalfCheetah-v4", n_envs, backend="envpool", num_threads=num_threads)
        env.reset()
        torch.set_num_threads(2)
        expected = torch.exp(numbers)
        before = set(os.listdir("/proc/self/task"))
        env.step(np.zeros((n_envs, 6)))
        left[num_threads] = len(before - set(os.listdir("/proc/self/task")))
        assert torch.equal(torch.exp(numbers), expected)
        env.close()
    assert left == {cores() - 1: 0, cores(): 1}


def test_the_backend_is_printed(capsys):
    env = make_vec_env("Pong-v5", 1, backend="ale")
    ANO("CnnPolicy", VecNormalize(env, norm_obs=False), n_steps=64, verbose=1)
    assert "The environments run on backend 'ale'." in capsys.readouterr().out
    ANO("CnnPolicy", env, n_steps=64)
    assert "backend" not in capsys.readouterr().out
    env.close()


def test_a_monitor_file_is_closed_with_the_last_reference(tmp_path, recwarn):
    warnings.simplefilter("always", ResourceWarning)
    env = make_vec_env("Hopper-v5", 2, backend="envpool", monitor_dir=tmp_path)
    env.reset()
    del env
    gc.collect()
    assert not [str(warning.message) for warning in recwarn if issubclass(warning.category, ResourceWarning)]


# What follows is SB3's make_vec_env, in arguments and results.


def pendulum(g: float = 10.0) -> gym.Env:
    return gym.make("Pendulum-v1", g=g, max_episode_steps=20)


def trajectory(env: VecEnv) -> np.ndarray:
    """Return observations of the reset and of steps with random actions; close the environments."""
    policy = RandomPolicy(env)
    observations = np.stack([env.reset(), *(env.step(policy.actions())[0] for _ in range(30))])
    env.close()
    return observations


def test_the_arguments_are_sb3s_in_its_order_and_then_keywords():
    ours, sb3s = (inspect.signature(function).parameters for function in (make_vec_env, env_util.make_vec_env))
    assert list(ours)[: len(sb3s)] == list(sb3s)
    assert [ours[name].default for name in sb3s] == [parameter.default for parameter in sb3s.values()]
    keywords = {name: ours[name].kind.name for name in list(ours)[len(sb3s) :]}
    assert keywords == {"backend": "KEYWORD_ONLY", "num_threads": "KEYWORD_ONLY"}
    assert vec_env.BACKENDS == ("auto", "gymnasium", "process", "envpool", "ale")


@pytest.mark.parametrize("env_id", ["Pendulum-v1", PendulumEnv, pendulum], ids=["id", "class", "function"])
@pytest.mark.parametrize(
    "arguments",
    [
        (3, 7, 5),
        (2, 7, 0, None, gym.wrappers.TimeLimit, {"g": 5.0}, None, None, None, {"max_episode_steps": 7}),
        (2, 7, 0, None, None, {"g": 5.0}, DummyVecEnv),
    ],
    ids=["start_index", "wrapper", "vec_env_cls"],
)
def test_one_seed_gives_sb3s_environments(env_id, arguments):
    ours, sb3s = make_vec_env(env_id, *arguments), env_util.make_vec_env(env_id, *arguments)
    assert type(ours) is (DummyVecEnv if DummyVecEnv in arguments else DirectVecEnv)
    sampled = [np.stack([space.sample() for space in env.get_attr("action_space")]) for env in (ours, sb3s)]
    np.testing.assert_array_equal(*sampled)
    np.testing.assert_array_equal(trajectory(ours), trajectory(sb3s))


def test_environments_in_processes_are_those_of_this_one_and_have_numbered_monitor_files(tmp_path):
    settings = {"n_envs": 1, "seed": 3, "env_kwargs": {"noop_max": 0}}
    processes = {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": "forkserver"}}
    env = make_vec_env("ALE/Pong-v5", start_index=3, monitor_dir=tmp_path, **settings, **processes)
    assert type(env.unwrapped) is SubprocVecEnv
    assert env.backend == "gymnasium"
    np.testing.assert_array_equal(trajectory(env), trajectory(make_vec_env("ALE/Pong-v5", backend="gymnasium", **settings)))
    assert [path.name for path in tmp_path.iterdir()] == ["3.monitor.csv"]
    assert len(load_results(str(tmp_path))) == 0


@pytest.mark.parametrize(("env_id", "expected"), [("CartPole", "CartPole-v1"), ("tests.envs.registering:Own-v3", "Own-v3")])
@pytest.mark.parametrize("vec_env_cls", [None, SubprocVecEnv])
def test_ids_are_read_as_by_gymnasium(env_id, expected, vec_env_cls):
    processes = {"vec_env_cls": vec_env_cls, "vec_env_kwargs": {"start_method": "forkserver"} if vec_env_cls else None}
    env = make_vec_env(env_id, 2, 3, **processes)
    assert env.get_attr("spec")[0].id == env.unwrapped.made_from[0] == expected
    env.close()
    assert kind("HalfCheetah") == kind("HalfCheetah-v5") == "EnvPoolVecEnv"


def test_a_module_that_an_id_names_must_exist():
    with pytest.raises(ValueError, match="env_id='no_such_module:A-v0' cannot be made: No module named 'no_such_module'"):
        make_vec_env("no_such_module:A-v0")


def test_environments_registered_in_this_process_are_known_in_the_others(monkeypatch):
    spec = gym.envs.registration.EnvSpec("OnlyHere-v0", entry_point=PendulumEnv, max_episode_steps=20)
    monkeypatch.setitem(gym.registry, spec.id, spec)
    processes = {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": "forkserver"}}
    env = make_vec_env(spec.id, 1, 3, **processes)
    np.testing.assert_array_equal(trajectory(env), trajectory(make_vec_env(spec.id, 1, 3)))
    env.close()
