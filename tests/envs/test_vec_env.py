"""Which backend an id and its arguments get, what the ids mean, and the errors."""

import gc
import os
import sys
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

from sb3_ano import ANO, MissingExtraError
from sb3_ano.envs import DirectVecEnv, make_vec_env, vec_env
from sb3_ano.envs.atari import AtariProtocol, atari_protocol
from sb3_ano._io import cores as processors
from tests.envs.backends import needs_atari, needs_envpool, needs_mujoco


def kind(env_id: str, **kwargs) -> str:
    """The name of the class of environments that ``"auto"`` takes."""
    env = make_vec_env(env_id, **{"n_envs": 2, **kwargs})
    env.close()
    return type(env.unwrapped).__name__


@pytest.fixture
def without(monkeypatch):
    """Hides a package as if it were not installed."""

    def hide(package: str, backend: str) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"sb3_ano.envs.{backend}_backend", raising=False)

    return hide


@needs_envpool
@pytest.mark.parametrize(
    "env_id", ["HalfCheetah-v4", "Hopper-v5", "Pong-v5", "PongNoFrameskip-v4", "ALE/Pong-v5", "Pendulum-v0"]
)
def test_auto_takes_envpool_for_atari_mujoco_and_what_only_it_has(env_id):
    assert kind(env_id) == "EnvPoolVecEnv"


@needs_envpool
@needs_mujoco
def test_auto_takes_gymnasium_for_a_single_mujoco_task(without):
    assert kind("HalfCheetah-v4", n_envs=1) == "DirectVecEnv"
    without("mujoco", "mujoco")
    assert kind("HalfCheetah-v4", n_envs=1) == "EnvPoolVecEnv"


@needs_envpool
@needs_mujoco
def test_auto_takes_gymnasium_for_arguments_that_only_it_knows():
    assert kind("Hopper-v5", wrapper_class=gym.wrappers.ClipAction) == "DirectVecEnv"
    assert kind("Hopper-v5", monitor_kwargs={"info_keywords": ("x_position",)}) == "DirectVecEnv"
    assert kind("Hopper-v5", env_kwargs={"healthy_z_range": (0.5, 2.0)}) == "DirectVecEnv"
    assert kind("Hopper-v5", env_kwargs={"terminate_when_unhealthy": False}) == "EnvPoolVecEnv"
    assert kind("Hopper-v5", env_kwargs={"render_mode": "rgb_array"}) == "DirectVecEnv"


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "LunarLander-v3"])
def test_auto_takes_gymnasium_for_tasks_that_differ_or_cost_nothing(env_id):
    # Not made: importing Box2D crashes where warnings are errors.
    assert vec_env._fastest(env_id, 8, None, {}) == "gymnasium"


@needs_atari
def test_auto_without_envpool_takes_ale_for_atari_and_gymnasium_for_the_rest(without):
    without("envpool", "envpool")
    assert kind("Pong-v5") == "AleVecEnv"
    assert kind("Hopper-v5") == "DirectVecEnv"


@needs_atari
def test_a_wrapper_replaces_the_atari_protocol():
    env = make_vec_env("PongNoFrameskip-v4", wrapper_class=AtariWrapper, wrapper_kwargs={"screen_size": 42})
    assert env.observation_space.shape == (42, 42, 1)
    env.close()


@pytest.mark.parametrize(
    ("env_id", "game", "sticky"),
    [
        ("Pong-v5", "Pong", 0.0),
        ("SpaceInvadersNoFrameskip-v4", "SpaceInvaders", 0.0),
        ("SpaceInvadersNoFrameskip-v0", "SpaceInvaders", 0.25),
        ("ALE/SpaceInvaders-v5", "SpaceInvaders", 0.25),
    ],
)
def test_an_atari_id_says_which_game_and_whether_actions_stick(env_id, game, sticky):
    assert atari_protocol(env_id) == AtariProtocol(game, sticky)


@pytest.mark.parametrize("env_id", ["Hopper-v5", "CartPole-v1", "ALE/Pong-ram-v5", "Pong-v4"])
def test_other_ids_name_no_protocol(env_id):
    assert atari_protocol(env_id) is None


def _probability(env) -> float:
    unwrapped = env.unwrapped
    if hasattr(unwrapped, "_settings"):
        return unwrapped._settings["repeat_action_probability"]
    return unwrapped.envs[0].unwrapped.ale.getFloat("repeat_action_probability")


@needs_envpool
@needs_atari
@pytest.mark.parametrize("backend", ["gymnasium", "envpool"])
@pytest.mark.parametrize(("env_id", "sticky"), [("Pong-v5", 0.0), ("PongNoFrameskip-v4", 0.0), ("ALE/Pong-v5", 0.25)])
def test_the_id_decides_about_sticky_actions_on_every_backend(backend, env_id, sticky):
    env = make_vec_env(env_id, backend=backend)
    assert _probability(env) == pytest.approx(sticky)
    env.close()
    env = make_vec_env(env_id, backend=backend, env_kwargs={"repeat_action_probability": 0.1})
    assert _probability(env) == pytest.approx(0.1)
    env.close()


@needs_atari
def test_sticky_actions_make_ale_forget_actions():
    def run(env_id: str) -> np.ndarray:
        env = make_vec_env(env_id, 1, backend="ale", seed=0, env_kwargs={"episodic_life": False})
        env.reset()
        seen = [env.step(np.array([2 + 3 * (step // 3 % 2) % 4]))[0] for step in range(40)]
        env.close()
        return np.stack(seen)

    np.testing.assert_array_equal(run("Pong-v5"), run("PongNoFrameskip-v4"))
    assert (run("Pong-v5") != run("ALE/Pong-v5")).any()


@needs_atari
@needs_envpool
@pytest.mark.parametrize("backend", ["gymnasium", "envpool", "ale"])
def test_the_protocol_can_be_changed(backend):
    changes = {"frame_stack": 1, "screen_size": 42, "full_action_space": True, "frame_skip": 2, "noop_max": 1}
    env = make_vec_env("Pong-v5", 2, backend=backend, env_kwargs=changes)
    assert env.observation_space == gym.spaces.Box(0, 255, (1, 42, 42), np.uint8)
    assert env.action_space == gym.spaces.Discrete(18)
    assert env.reset().shape == (2, 1, 42, 42)
    env.close()


@needs_atari
@pytest.mark.parametrize(
    ("name", "value"), [("noop_max", -1), ("frame_skip", 0), ("frame_stack", 1.5), ("repeat_action_probability", 2.0)]
)
def test_a_protocol_that_cannot_be_played_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} is not allowed"):
        make_vec_env("Pong-v5", env_kwargs={name: value})


@needs_envpool
def test_envpool_is_not_asked_for_no_noops_at_all():
    with pytest.raises(ValueError, match="noop_max=0 is not allowed with backend 'envpool'"):
        make_vec_env("Pong-v5", backend="envpool", env_kwargs={"noop_max": 0})


@needs_atari
@needs_envpool
@pytest.mark.parametrize("game", ["MsPacman", "NameThisGame", "Qbert", "UpNDown", "BattleZone"])
def test_games_have_the_same_names_and_actions_everywhere(game):
    made = [make_vec_env(f"{game}-v5", 1, backend=backend) for backend in ("gymnasium", "envpool", "ale")]
    assert len({str(env.action_space) for env in made}) == 1
    assert len({str(env.observation_space) for env in made}) == 1
    for env in made:
        env.close()


@needs_envpool
def test_envpool_renders_to_pictures_on_request():
    env = make_vec_env("Pong-v5", 2, backend="envpool", env_kwargs={"render_mode": "rgb_array"})
    with pytest.raises(RuntimeError, match=r"call reset\(\) before rendering"):
        env.render()
    env.reset()
    assert [image.shape for image in env.get_images()] == [(210, 160, 3)] * 2
    assert env.render().ndim == 3
    env.close()


def test_gymnasiums_environments_are_ready_to_be_rendered():
    env = make_vec_env("CartPole-v1", 2, backend="gymnasium")
    assert isinstance(env, DirectVecEnv)
    assert env.render_mode == "rgb_array"
    env.close()


def processors_of_threads() -> dict[int, set[int]]:
    """The processors that each thread of this process may run on."""
    return {int(task.name): os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()}


@needs_envpool
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(processors() != os.cpu_count(), reason="not all processors may be used")
def test_envpools_threads_stay_on_a_processor_each_only_if_there_is_one_for_each():
    everywhere = os.sched_getaffinity(0)
    n_processors = len(everywhere)

    def threads_made_for(num_threads: int) -> list[set[int]]:
        before = processors_of_threads()
        env = make_vec_env("HalfCheetah-v4", n_processors + 1, backend="envpool", num_threads=num_threads)
        env.reset()
        made = [allowed for task, allowed in processors_of_threads().items() if task not in before]
        env.close()
        return made

    pinned = [allowed for allowed in threads_made_for(n_processors) if len(allowed) == 1]
    assert set.union(*pinned) == everywhere
    assert len(pinned) == n_processors
    assert all(allowed == everywhere for allowed in threads_made_for(n_processors + 1))


@pytest.mark.parametrize("n_envs", [0, -1, 1.5, "2", True, None])
def test_a_number_of_environments_that_is_none_is_refused(n_envs):
    with pytest.raises(ValueError, match=f"n_envs={n_envs!r} is not allowed; allowed are whole numbers from 1"):
        make_vec_env("CartPole-v1", n_envs)


def test_a_number_of_threads_that_is_none_is_refused():
    with pytest.raises(ValueError, match="num_threads=0 is not allowed"):
        make_vec_env("CartPole-v1", num_threads=0)
    with pytest.raises(ValueError, match="backend 'gymnasium', which has one thread"):
        make_vec_env("CartPole-v1", backend="gymnasium", num_threads=2)


def test_an_unknown_backend_is_refused_with_a_suggestion():
    with pytest.raises(ValueError, match="backend='envpol' is unknown, did you mean 'envpool'"):
        make_vec_env("CartPole-v1", backend="envpol")


@needs_envpool
@needs_atari
@pytest.mark.parametrize(
    ("backend", "env_id", "near"),
    [
        ("envpool", "HalfCheeta-v4", "'HalfCheetah-v4'"),
        ("envpool", "Breakou-v5", "'Breakout-v5'"),
        ("ale", "Breakou-v5", "'Breakout-v5'"),
        ("ale", "ALE/Breakou-v5", "'Breakout-v5'"),
        ("gymnasium", "CartPol-v1", "'CartPole-v1'"),
    ],
)
def test_an_unknown_id_is_named_with_its_backend_and_what_is_near(backend, env_id, near):
    with pytest.raises(ValueError, match=f"env_id='{env_id}' is unknown to backend '{backend}', did you mean .*{near}"):
        make_vec_env(env_id, backend=backend)


@pytest.mark.parametrize("env_id", ["Nothing-v0", "no space/Nothing-v0", "", "a/b/c-v0", "ALE/Nothing-v5"])
def test_an_id_that_nobody_knows_is_a_value_error(env_id):
    with pytest.raises(ValueError, match=f"env_id='{env_id}'"):
        make_vec_env(env_id)


def test_a_game_without_the_packages_names_the_extra(monkeypatch):
    monkeypatch.setattr("sb3_ano.envs.vec_env._installed", lambda package: False)
    with pytest.raises(ValueError, match=r"env_id='Pong-v5' is unknown .* it needs ale-py: pip install 'sb3-ano\[atari\]'"):
        make_vec_env("Pong-v5")
    with pytest.raises(ValueError, match=r"env_id='CartPol-v1' is unknown .*\?$"):
        make_vec_env("CartPol-v1")


@needs_atari
def test_a_task_that_is_no_atari_game_is_refused_by_ale():
    with pytest.raises(ValueError, match="env_id='CartPole-v1' is unknown to backend 'ale'"):
        make_vec_env("CartPole-v1", backend="ale")


@needs_envpool
def test_envpool_refuses_spaces_that_policies_cannot_use():
    with pytest.raises(ValueError, match="env_id='FrozenLake-v1' has spaces that backend 'envpool' does not support"):
        make_vec_env("FrozenLake-v1", backend="envpool")


@needs_envpool
def test_arguments_that_a_backend_cannot_have_are_refused():
    with pytest.raises(ValueError, match="wrapper_class is not allowed with backend 'envpool'"):
        make_vec_env("Hopper-v5", backend="envpool", wrapper_class=gym.wrappers.ClipAction)
    with pytest.raises(TypeError, match="EnvPool's Hopper-v5 does not know: seed"):
        make_vec_env("Hopper-v5", backend="envpool", env_kwargs={"seed": 1})
    with pytest.raises(ValueError, match="render_mode='human' is not allowed with backend 'envpool'"):
        make_vec_env("Hopper-v5", backend="envpool", env_kwargs={"render_mode": "human"})


@pytest.mark.parametrize(
    ("backend", "package", "env_id", "extra"),
    [
        ("envpool", "envpool", "Hopper-v5", "envpool"),
        ("ale", "ale_py", "Pong-v5", "atari"),
        ("auto", "ale_py", "ALE/Pong-v5", "atari"),
    ],
)
def test_a_missing_package_is_one_line_that_names_the_extra(without, backend, package, env_id, extra):
    without("envpool", "envpool")
    without(package, "ale")
    with pytest.raises(MissingExtraError, match=rf"pip install 'sb3-ano\[{extra}\]'"):
        make_vec_env(env_id, backend=backend)


@needs_atari
def test_stacks_of_one_picture_are_not_stacked():
    env = make_vec_env("Pong-v5", backend="gymnasium", env_kwargs={"frame_stack": 1})
    assert not isinstance(env, VecFrameStack)
    env.close()


def test_the_list_of_backends_is_the_one_that_is_checked():
    assert vec_env.BACKENDS == ("auto", "gymnasium", "envpool", "ale")


@needs_envpool
@needs_atari
@pytest.mark.parametrize(
    ("env_id", "backend", "key", "message"),
    [
        ("Hopper-v5", "envpool", "frame_skp", "EnvPool's Hopper-v5 does not know: frame_skp, did you mean 'frame_skip'"),
        ("Hopper-v5", "auto", "frame_skp", "gymnasium's Hopper-v5 does not know: frame_skp, did you mean 'frame_skip'"),
        ("CartPole-v1", "gymnasium", "xyzzy", "gymnasium's CartPole-v1 does not know: xyzzy$"),
        ("ALE/Pong-v5", "auto", "noop_mx", "gymnasium's ALE/Pong-v5 does not know: noop_mx, did you mean 'noop_max'"),
        ("Pong-v5", "ale", "frame_stak", "ale-py's Pong-v5 does not know: frame_stak, did you mean 'frame_stack'"),
    ],
)
def test_an_unknown_setting_is_named_with_what_is_near(env_id, backend, key, message):
    # Review users U11.
    with pytest.raises(TypeError, match=f"env_kwargs has keys that {message}") as raised:
        make_vec_env(env_id, 2, backend=backend, env_kwargs={key: 1})
    assert "\n" not in str(raised.value)


def test_a_type_error_of_the_environment_itself_stays_as_it_is():
    def broken(**settings):
        raise TypeError("f() got an unexpected keyword argument 'colour'")

    with pytest.raises(TypeError, match=r"^f\(\) got an unexpected"):
        make_vec_env(broken, env_kwargs={"size": 3})


@needs_envpool
@needs_atari
@pytest.mark.parametrize("backend", ["gymnasium", "envpool", "ale"])
def test_the_backend_can_be_read_and_is_said_in_words(backend, capsys):
    # Review users U9.
    env = make_vec_env("Pong-v5", 1, backend=backend)
    assert env.backend == backend
    ANO("CnnPolicy", VecNormalize(env, norm_obs=False), n_steps=64, verbose=1)
    assert f"The environments run on backend '{backend}'." in capsys.readouterr().out
    ANO("CnnPolicy", env, n_steps=64)
    assert "backend" not in capsys.readouterr().out
    env.close()


@needs_envpool
def test_a_monitor_file_is_closed_with_the_last_reference(tmp_path, recwarn):
    # Review users U11.
    warnings.simplefilter("always", ResourceWarning)
    env = make_vec_env("Hopper-v5", 2, backend="envpool", monitor_dir=tmp_path)
    env.reset()
    del env
    gc.collect()
    assert not [str(warning.message) for warning in recwarn if issubclass(warning.category, ResourceWarning)]
