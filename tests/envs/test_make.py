"""Environments by id, and missing extras."""

import builtins
import sys

import pytest
from gymnasium.error import DependencyNotInstalled

from sb3_ano import ANO, MissingExtraError
from sb3_ano.envs import explained_missing_packages, make_env


def test_an_environment_can_be_rendered_to_pictures():
    env = make_env("CartPole-v1")
    assert env.render_mode == "rgb_array"


def test_atari_is_registered_on_demand():
    env = make_env("ALE/Pong-v5")
    assert env.observation_space.shape == (210, 160, 3)
    env.close()


@pytest.mark.parametrize("env_id", ["CartPol-v1", "CartPole-v9", "NoSpace/Nothing-v0", "", "Cart Pole-v1", "a/b/c-v0"])
def test_an_unknown_id_is_a_value_error_that_names_it(env_id):
    with pytest.raises(ValueError, match=f"env='{env_id}' is not a registered environment"):
        ANO("MlpPolicy", env_id)


@pytest.mark.parametrize(("env_id", "module", "extra"), [("ALE/Pong-v5", "ale_py", "atari")])
def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch, env_id, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"pip install 'sb3-ano\[{extra}\]'"):
        ANO("CnnPolicy", env_id)


def test_gymnasiums_own_complaint_names_the_extra_too():
    with pytest.raises(MissingExtraError, match=r"mujoco is not installed.*sb3-ano\[mujoco\]"), explained_missing_packages():
        raise DependencyNotInstalled('MuJoCo is not installed, run `pip install "gymnasium[mujoco]"`')
    for others in ("somebody else's package", "the equivalent of mujoco_py"):
        with pytest.raises(DependencyNotInstalled), explained_missing_packages():
            raise DependencyNotInstalled(others)


def test_missing_mujoco_is_explained(monkeypatch):
    real_import = builtins.__import__

    def without_mujoco(name, *args, **kwargs):
        if name.split(".")[0] == "mujoco":
            raise ImportError("No module named 'mujoco'")
        return real_import(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith(("gymnasium.envs.mujoco", "mujoco"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_mujoco)
    with pytest.raises(MissingExtraError, match=r"sb3-ano\[mujoco\]"):
        make_env("HalfCheetah-v5")
