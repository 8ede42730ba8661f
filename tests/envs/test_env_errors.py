"""Errors of make_env and make_vec_env: one line with the argument, the value, and what is allowed."""

import sys

import pytest
from gymnasium.envs.classic_control import PendulumEnv
from gymnasium.error import DependencyNotInstalled
from stable_baselines3.common.vec_env import SubprocVecEnv

from sb3_ano import ANO, MissingExtraError
from sb3_ano.envs import explained_missing_packages, make_env, make_vec_env
from tests.envs.backends import needs_all

pytestmark = needs_all
POOL, ALE, PYTHON = ({"backend": backend} for backend in ("envpool", "ale", "gymnasium"))
UNKNOWN_IDS = ["Nothing-v0", "no space/Nothing-v0", "", "a/b/c-v0", "CartPole-v9"]
PROTOCOLS = [("noop_max", -1), ("frame_skip", 0), ("frame_stack", 1.5), ("screen_size", True), ("max_frames", "many")]
PROTOCOLS += [("repeat_action_probability", 2.0), ("repeat_action_probability", -0.1)]
TO_GYMNASIUM = "is not allowed with backend 'envpool'; backend 'gymnasium' takes it"
# Unknown keys of env_kwargs, and what the message says of them.
SETTINGS = [
    ("Hopper-v5", POOL, "frame_skp", "EnvPool's Hopper-v5 does not know: frame_skp, did you mean 'frame_skip'"),
    ("Hopper-v5", POOL, "seed", "EnvPool's Hopper-v5 does not know: seed"),
    ("CartPole-v1", PYTHON, "xyzzy", "gymnasium's CartPole-v1 does not know: xyzzy$"),
    ("Pong-v5", POOL, "stack_num", "'stack_num', which Pong does not know; its name is 'frame_stack'"),
    ("Pong-v5", ALE, "reward_clipping", "'reward_clipping', which Pong does not know; its name is 'clip_reward'"),
    ("PongNoFrameskip-v4", {}, "max_episode_steps", "which Pong does not know; its name is 'max_frames'"),
    ("Pong-v5", ALE, "continuous", "ale-py's Pong-v5 does not know: continuous"),
    ("ALE/Pong-v5", {}, "noop_mx", "gymnasium's ALE/Pong-v5 does not know: noop_mx, did you mean 'noop_max'"),
    ("Pong-v5", ALE, "frame_stak", "ale-py's Pong-v5 does not know: frame_stak, did you mean 'frame_stack'"),
    (PendulumEnv, {}, "render_mod", "gymnasium's .*PendulumEnv.* does not know: render_mod, did you mean 'render_mode'"),
]


@pytest.mark.parametrize(
    ("env_id", "arguments", "message"),
    [
        *(("CartPole-v1", {"n_envs": n}, f"n_envs={n!r} is not allowed; allowed are") for n in (0, -1, 1.5, "2", True, None)),
        ("CartPole-v1", {"num_threads": 0}, "num_threads=0 is not allowed"),
        ("CartPole-v1", {"num_threads": 2, **PYTHON}, "backend 'gymnasium', which has one thread"),
        ("CartPole-v1", {"backend": "envpol"}, "backend='envpol' is unknown, did you mean 'envpool'"),
        ("CartPole-v1", {"seed": "envpool"}, "seed='envpool' is not allowed.*is a keyword argument: backend='envpool'"),
        ("CartPole-v1", {"seed": 0.5}, "seed=0.5 is not allowed; allowed are integers and None$"),
        *((env_id, {}, f"env_id='{env_id}'") for env_id in [*UNKNOWN_IDS, "ALE/Nothing-v5"]),
        ("Breakou-v5", POOL, "'Breakou-v5' is unknown to backend 'envpool', did you mean 'Breakout-v5'"),
        ("ALE/Breakou-v5", ALE, "'ALE/Breakou-v5' is unknown to backend 'ale', did you mean 'Breakout-v5'"),
        ("CartPole-v1", ALE, "'CartPole-v1' is unknown to backend 'ale'"),
        ("Pendulm-v1", {"vec_env_cls": SubprocVecEnv}, "'Pendulm-v1' is unknown to backend 'gymnasium', did you mean .*m-v1'"),
        ("TicTacToe-v1", {}, "env_id='TicTacToe-v1' is a game of 2 players; environments of SB3 have one"),
        (
            "D1Basic-v1",
            {},
            "env_id='D1Basic-v1' has actions without bounds, .*'use_combined_action': True} they are discrete",
        ),
        ("Sudoku-v0", {}, "env_id='Sudoku-v0' cannot be made by backend 'envpool': failed to open Sudoku database"),
        ("CheetahRun-v1", {"env_kwargs": {"frame_stak": 2}}, "EnvPool's CheetahRun-v1 does not know: frame_stak, did you"),
        ("Hopper-v5", {**POOL, "start_index": 1, "vec_env_cls": SubprocVecEnv}, f"start_index, vec_env_cls {TO_GYMNASIUM}"),
        (PendulumEnv, POOL, f"env_id=<class .*PendulumEnv'> {TO_GYMNASIUM}"),
        ("CartPole-v1", {"wrapper_kwargs": {"noop_max": 1}}, "not allowed without wrapper_class$"),
        ("Pong-v5", {"wrapper_kwargs": {"noop_max": 1}}, "not allowed without wrapper_class; .* go into env_kwargs"),
        *(("Pong-v5", {"env_kwargs": {name: value}}, f"{name}={value!r} is not allowed") for name, value in PROTOCOLS),
        ("Pong-v5", {**POOL, "env_kwargs": {"noop_max": 0}}, "noop_max=0 is not allowed with backend 'envpool'"),
        *(
            ("Hopper-v5", {**POOL, "env_kwargs": {name: -1}}, f"{name}=-1 is not allowed")
            for name in ("max_episode_steps", "frame_skip")
        ),
        ("Hopper-v5", {**POOL, "env_kwargs": {"reset_noise_scale": None}}, "'reset_noise_scale': None.* does not know"),
        ("Hopper-v5", {**POOL, "env_kwargs": {"render_mode": "human"}}, "render_mode='human' is not allowed with"),
        *((env_id, {**backend, "env_kwargs": {key: 1}}, message) for env_id, backend, key, message in SETTINGS),
    ],
)
def test_invalid_arguments_raise(env_id, arguments, message):
    with pytest.raises(TypeError if "does not know" in message else ValueError, match=message) as raised:
        make_vec_env(env_id, **{"n_envs": 2, **arguments})
    assert "\n" not in str(raised.value)


def test_a_type_error_of_the_environment_itself_stays():
    def broken(**settings):
        raise TypeError("f() got an unexpected keyword argument 'color'")

    with pytest.raises(TypeError, match=r"^f\(\) got an unexpected"):
        make_vec_env(broken, env_kwargs={"size": 3})


@pytest.mark.parametrize("env_id", UNKNOWN_IDS)
def test_an_unknown_id_of_a_model_is_named(env_id):
    with pytest.raises(ValueError, match=f"env='{env_id}' is not a registered environment"):
        ANO("MlpPolicy", env_id)


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [
        (lambda: make_vec_env("Hopper-v5", backend="envpool"), "envpool", "envpool"),
        (lambda: make_vec_env("Pong-v5", backend="ale"), "ale_py", "atari"),
        (lambda: make_vec_env("ALE/Pong-v5"), "ale_py", "atari"),
        (lambda: ANO("CnnPolicy", "ALE/Pong-v5"), "ale_py", "atari"),
    ],
)
def test_a_missing_package_is_one_line_that_names_the_extra(without, make, package, extra):
    without("envpool")
    without(package)
    with pytest.raises(MissingExtraError, match=rf"pip install 'sb3-ano\[{extra}\]'"):
        make()


def test_errors_about_packages_of_gymnasium_name_the_extra(without, monkeypatch):
    for others in ("somebody else's package", "the equivalent of mujoco_py"):
        with pytest.raises(DependencyNotInstalled), explained_missing_packages():
            raise DependencyNotInstalled(others)
    make_env("HalfCheetah-v5").close()  # imports its module, which is put back at the end
    without("mujoco")
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtraError, match=r"mujoco is not installed.*sb3-ano\[mujoco\]"):
        make_env("HalfCheetah-v5")
    monkeypatch.setattr("sb3_ano.envs.vec_env._installed", lambda package: False)
    with pytest.raises(ValueError, match=r"env_id='Pong-v5' is unknown .* it needs ale-py: pip install 'sb3-ano\[atari\]'"):
        make_vec_env("Pong-v5")
    with pytest.raises(ValueError, match=r"'CartPol-v1' is unknown to backend 'gymnasium', did you mean 'CartPole-v1'\?$"):
        make_vec_env("CartPol-v1")
