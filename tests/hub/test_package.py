"""Packages: the evaluation, the card, what a stranger runs, what is published, and the video.

An agent is evaluated in the environment that it was trained in, or in none.
"""

import ast
import base64
import importlib
import json
import os
import re
import shutil
from importlib import metadata
from pathlib import Path
from unittest import mock

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest
import torch
import yaml
from gymnasium.wrappers import TransformReward
from huggingface_hub import ModelCard
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize, unwrap_vec_normalize

from sb3_ano import MaskableANO, RecurrentMaskableANO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import load_safe
from sb3_ano.hub.video import software_rendering
from tests.common import PROJECT, ROOT, SMALL, pseudo_huber
from tests.envs.backends import needs_atari, needs_envpool
from tests.hub.agents import CustomPolicy, Reversed, trained


@pytest.fixture
def evaluated(pack):
    """A function that evaluates an agent as a package does."""

    def evaluate(model, env=None, n_episodes=1, **options):
        folder = pack(model, env, n_eval_episodes=n_episodes, **options)
        return json.loads((folder / "results.json").read_text()) | {"card": (folder / "README.md").read_text()}

    return evaluate


def pendulums(n_envs: int = 1, backend: str = "gymnasium", **options):
    return make_vec_env("Pendulum-v1", n_envs, backend=backend, **options)


def inside(n_envs: int = 1, **options):
    return VecFrameStack(VecNormalize(pendulums(n_envs), **options), 2)


def outside(n_envs: int = 1, **options):
    return VecNormalize(VecFrameStack(pendulums(n_envs), 2), **options)


def returns_by_hand(model, env, n_episodes, seed) -> list[float]:
    """gymnasium's loop, with observations normalized by the formula of VecNormalize."""
    statistics = model.get_vec_normalize_env()
    observation, _ = env.reset(seed=seed)
    returns, total = [], 0.0
    while len(returns) < n_episodes:
        if statistics is not None:
            rms = statistics.obs_rms
            scaled = (observation - rms.mean) / np.sqrt(rms.var + statistics.epsilon)
            observation = np.clip(scaled, -statistics.clip_obs, statistics.clip_obs).astype(np.float32)
        observation, reward, terminated, truncated, _ = env.step(model.predict(observation, deterministic=True)[0])
        total += float(reward)
        if terminated or truncated:
            returns.append(total)
            observation, total = env.reset()[0], 0.0
    return returns


@pytest.mark.parametrize(("agent", "env_id"), [("cartpole", "CartPole-v1"), ("pendulum", "Pendulum-v1")])
def test_returns_are_those_of_gymnasiums_loop(agent, env_id, evaluated, request):
    model = request.getfixturevalue(agent)
    results = evaluated(model, n_episodes=3, seed=7)
    returns = results["episode_returns"]
    assert returns == pytest.approx(returns_by_hand(model, gym.make(env_id), 3, seed=7), abs=1e-3)
    assert (results["mean_reward"], results["std_reward"]) == pytest.approx((np.mean(returns), np.std(returns)))


def test_settings_are_published_unless_they_are_the_defaults_of_the_id(evaluated):
    assert evaluated(trained(env=gym.make("FrozenLake-v1"), steps=0), name="lake")["env_kwargs"] == {}
    settings = {"max_episode_steps": 50}  # which the environment does not know
    results = evaluated(trained(env=gym.make("Pendulum-v1", **settings), steps=0), env_kwargs=settings)
    assert (results["env_kwargs"], results["episode_lengths"]) == (settings, [50])


FORKED = {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": "fork"}}
KNOWN, UNKNOWN = {"max_episode_steps": 50, "g": 2.0}, {"version": 0}
TRAINED_IN = [
    (lambda: make_vec_env("CartPole-v1", 2, wrapper_class=Reversed), {}, "Reversed"),
    (lambda: make_vec_env("CartPole-v1", 2, **FORKED), {}, "settings that cannot be read"),
    (lambda: TransformReward(gym.make("Pendulum-v1"), abs), {}, "TransformReward{'func': .*abs>}"),
    (lambda: gym.make("Pendulum-v1", max_episode_steps=50), {}, "max_episode_steps=50"),
    (lambda: gym.make("CartPole-v1").unwrapped, {}, "max_episode_steps=None"),
    (lambda: outside(2), {}, "VecFrameStack"),
    (lambda: inside(2), {}, "VecFrameStack, VecNormalize"),
    (lambda: pendulums(2, env_kwargs=KNOWN), KNOWN, ""),
    (lambda: pendulums(2, backend="envpool"), {}, ""),
    (lambda: pendulums(2, backend="envpool", env_kwargs=UNKNOWN), UNKNOWN, "what its id does not make .TypeError.*"),
]


@needs_envpool
@pytest.mark.filterwarnings("ignore:.*precision lowered")
@pytest.mark.parametrize(("make", "settings", "additions"), TRAINED_IN)
def test_an_environment_that_its_id_and_settings_do_not_make_has_to_be_given(make, settings, additions, evaluated):
    """The score of another task was published, or an AssertionError came from inside SB3."""
    model = trained(env=make(), steps=0)
    env_id = "CartPole-v1" if model.observation_space.shape == (4,) else "Pendulum-v1"
    if additions:
        with pytest.raises(ValueError, match=f"'{env_id}' is not what the .* trained in.* has {additions}:.* as env="):
            evaluated(model)
        results = evaluated(model, model.get_env())
    else:
        results = evaluated(model)
        assert results["episode_lengths"] == [settings.get("max_episode_steps", 200)]
        assert f"'{env_id}', backend='gymnasium', seed=0, env_kwargs={settings})" in results["card"]
    assert (results["env_id"], results["env_kwargs"]) == (env_id, settings)
    listed = f"The agent's environment is `{env_id}` with `{additions.replace(', ', '`, `')}`. Neither"
    assert bool(re.search(listed, results["card"])) == bool(additions)
    assert "TypeError:" not in results["card"]  # messages may hold paths
    model.get_env().close()


def test_the_score_is_that_of_the_environment_that_was_given(evaluated):
    """9.10 on the card of an agent that scores 500 in its own environment. Wrapped rewards do not count."""
    model = trained(env=make_vec_env("CartPole-v1", 1, wrapper_class=Reversed), steps=1024)
    returns = evaluated(model, model.get_env(), 5, seed=3)["episode_returns"]
    assert returns == returns_by_hand(model, Reversed(gym.make("CartPole-v1")), 5, seed=3)
    assert returns != returns_by_hand(model, gym.make("CartPole-v1"), 5, seed=3)
    env = DummyVecEnv([lambda: TransformReward(Monitor(Reversed(gym.make("CartPole-v1"))), lambda reward: -5 * reward)])
    assert evaluated(model, env, 5, seed=3)["episode_returns"] == returns


def test_statistics_are_used_where_the_training_had_them_and_environments_are_left_as_they_were(evaluated):
    """VecNormalize and VecFrameStack in either order."""
    stacked = VecFrameStack(pendulums(), 2)
    for make, other in ((inside, stacked), (inside, outside()), (outside, inside())):
        model, given = trained(env=make(clip_obs=0.5)), make()
        environments = [unwrap_vec_normalize(env) for env in (model.get_env(), given)]
        before = [(env.obs_rms.mean.tolist(), env.obs_rms.count, env.training, env.norm_reward) for env in environments]
        expected = evaluated(model, model.get_env(), seed=5)["episode_returns"]
        assert evaluated(model, given, seed=5)["episode_returns"] == expected
        after = [(env.obs_rms.mean.tolist(), env.obs_rms.count, env.training, env.norm_reward) for env in environments]
        assert after == before
        with pytest.raises(ValueError, match="observations of env"):
            evaluated(model, other)
    assert evaluated(model, stacked, seed=5)["episode_returns"] == expected


GAMES = [("PongNoFrameskip-v4", "gymnasium"), ("Pong-v5", "ale")]
GAMES += [(env_id, "envpool") for env_id in ("PongNoFrameskip-v4", "Pong-v5", "ALE/Pong-v5")]


@needs_atari
@needs_envpool
@pytest.mark.parametrize(("env_id", "backend"), GAMES)
def test_an_atari_game_keeps_the_id_that_it_was_trained_with(env_id, backend, pack, capsys):
    """No agent of EnvPool could be packaged under two of the three ids. Other rules are another task."""
    env = VecNormalize(make_vec_env(env_id, 2, backend=backend, env_kwargs={"episodic_life": False}), norm_obs=False)
    model = trained(env=env, policy="CnnPolicy", steps=0)
    with pytest.raises(ValueError, match="n_eval_episodes=0"):
        pack(model, verbose=1, n_eval_episodes=0)
    with pytest.raises(ValueError, match="has no EpisodicLifeEnv|has task=.*'episodic_life': False"):
        pack(model, env_kwargs={})
    assert f" agent for {env_id} over" in capsys.readouterr().out
    env.close()


def code_of(folder: Path) -> str:
    """The Python in a package's card."""
    return (folder / "README.md").read_text().split("```python\n")[1].split("\n```")[0]


def test_the_hub_reads_numbers_and_words_and_the_page_says_how_the_agent_was_judged_and_trained(cartpole, pack, packed):
    folder = pack(cartpole, license="apache-2.0", n_eval_episodes=3, seed=4)
    card, results = ModelCard.load(folder / "README.md"), json.loads((folder / "results.json").read_text())
    data = card.data.to_dict()
    expected = {"library_name": "stable-baselines3", "pipeline_tag": "reinforcement-learning", "license": "apache-2.0"}
    words = ["CartPole-v1", "deep-reinforcement-learning", "reinforcement-learning", "stable-baselines3", "sb3-ano", "ano"]
    assert {**data, **expected, "tags": words} == data
    ((result,),) = (entry["results"] for entry in data["model-index"])
    assert result["dataset"] == {"name": "CartPole-v1", "type": "CartPole-v1"}
    arguments = {"n_eval_episodes": 3, "deterministic": True, "seed": 4}
    found = [(metric["type"], metric["value"], metric["args"]) for metric in result["metrics"]]
    assert found == [(name, results[name], arguments) for name in ("mean_reward", "std_reward")]
    mean, std, length = results["mean_reward"], results["std_reward"], np.mean(results["episode_lengths"])
    row = f"| {mean:.2f} | {std:.2f} | 3 | {length:.1f} | deterministic | 4 |"
    trained = ("- algorithm: ANO, 2,048 steps, 2 environment(s)", "- seed: 0", f"torch {metadata.version('torch')}")
    for part in (row, *trained, "zhang2026ano", "pickles: loading it runs whatever code"):
        assert part in card.text
    # The license is only named if the author names one.
    assert "licen" not in packed["README.md"].decode().lower()


# The extra, and the package in it, that an environment needs.
REQUIREMENTS = {"CartPole-v1": [], "HalfCheetah-v5": ["mujoco"], "Pong-v5": ["atari", "ale-py"], "Catch-v0": ["envpool"]}
REQUIREMENTS["CartPoleNoVel-v1"] = ["zoo", "rl_zoo3"]


@needs_envpool
@pytest.mark.parametrize(("env_id", "needed"), REQUIREMENTS.items())
def test_the_requirements_are_those_of_the_package_and_the_environment(env_id, needed, cartpole, evaluated):
    """The first command of the card failed; the versions of all packages were listed."""
    importlib.import_module("rl_zoo3.import_envs")  # registers CartPoleNoVel-v1
    results = evaluated(cartpole, cartpole.get_env(), env_id=env_id)
    command = f'\npip install "sb3-ano[{",".join(["hub", *needed[:1]])}] @ git+{PROJECT["urls"]["Repository"]}"\n'
    assert command in results["card"]
    assert ("\nimport rl_zoo3.import_envs\n" in results["card"]) == ("NoVel" in env_id), "a function registers it"
    installed = {distribution.name.lower() for distribution in metadata.distributions()}
    common = {"python", "sb3-ano", "stable-baselines3", "torch", "gymnasium", "numpy"}
    assert set(results["versions"]) == common | (set(needed[-1:]) & installed)


def test_no_name_writes_code_or_markdown_into_the_card(cartpole, pack):
    """env_id= went unescaped into the Python of the card."""
    with pytest.raises(ValueError, match="env_id=.* is not allowed.* register it with gymnasium"):
        pack(cartpole, cartpole.get_env(), env_id='x"); evil("-v0')
    hostile = "');evil()\n```\nevil()"
    made = trained(env=gym.make("CartPole-v1", sutton_barto_reward=hostile), steps=0)
    for model, env, env_kwargs in ((made, None, None), (cartpole, cartpole.get_env(), {f"`{hostile}`": hostile})):
        folder = pack(model, env, env_kwargs=env_kwargs)
        calls = [node.func for node in ast.walk(ast.parse(code_of(folder))) if isinstance(node, ast.Call)]
        assert not any(getattr(function, "id", "") == "evil" for function in calls)
        assert (folder / "README.md").read_text().count("\n```") == 8, "two fences for each of four blocks"


def run_snippet(folder, monkeypatch, env=None) -> dict:
    """Run a card's Python as printed, with the agent taken from the directory instead of the Hub."""
    monkeypatch.setattr("sb3_ano.hub.load_from_hub", lambda repo_id, env, **options: load_safe(folder, env, **options))
    names: dict = {} if env is None else {"env": env}
    exec(code_of(folder), names)
    assert names["mean"] == pytest.approx(json.loads((folder / "results.json").read_text())["mean_reward"])
    return names


CUSTOM = {"learning_rate": lambda progress: 1e-3, "policy": CustomPolicy, "shaping": ("ano", pseudo_huber)}
NEEDS = "- `import tests.hub.agents`: the author's module with tests.hub.agents:CustomPolicy, for policy\n"
PARTS = f"- `shaping`: `ano, tests.common:pseudo_huber`\n- `learning_rate`: `{__name__}:<lambda>`\n"
CODE = "^ano-CartPole-v1.zip holds the code of learning_rate, .*the values of the globals"
NAMELESS = {"shaping": lambda x: x - x * x}, f"- `shaping`: `{__name__}:<lambda>`\n", "cannot be imported"


@pytest.mark.filterwarnings("ignore:.*(stored by name only|cannot be imported|is another function):UserWarning")
@pytest.mark.parametrize(("options", "remarks", "warning"), [NAMELESS, (CUSTOM, (NEEDS, PARTS), CODE)])
def test_the_card_names_what_only_the_author_has(options, remarks, warning, pack, monkeypatch):
    """What cannot be imported by name is pickled as code, with the globals that it uses."""
    with pytest.warns(UserWarning, match=warning):
        folder = pack(trained(steps=0, **options))
    for remark in [remarks] if isinstance(remarks, str) else remarks:
        assert remark in (folder / "README.md").read_text()
    assert isinstance(run_snippet(folder, monkeypatch)["model"].policy, options.get("policy", object))


class OfThisScript(CustomPolicy):
    """A policy of the script that the author runs."""


@pytest.mark.filterwarnings("ignore:stored by name only:UserWarning", "ignore:.*holds the code of:UserWarning")
def test_what_cannot_be_imported_has_to_be_defined_first(pack, monkeypatch):
    monkeypatch.setattr(OfThisScript, "__module__", "__main__")
    monkeypatch.setattr("__main__.OfThisScript", OfThisScript, raising=False)
    folder = pack(trained(steps=0, policy=OfThisScript, policy_kwargs={"anything": {"part": object()}}))
    card = (folder / "README.md").read_text()
    assert "- `OfThisScript`: __main__:OfThisScript of the author's code, for policy, which cannot be imported" in card
    assert "- `part`: builtins:object of the author's code, for policy_kwargs.anything.part, which" in card
    assert "custom_objects={'policy': OfThisScript, 'policy_kwargs.anything.part': part})" in code_of(folder)
    assert " at 0x" not in card


def test_the_snippet_leaves_the_reader_only_what_an_id_and_settings_cannot_make(pack, monkeypatch):
    folder = pack(trained(env=Reversed(gym.make("Pendulum-v1")), steps=0), Reversed(gym.make("Pendulum-v1")))
    run_snippet(folder, monkeypatch, env=make_vec_env("Pendulum-v1", wrapper_class=Reversed, seed=0, backend="gymnasium"))
    assert "own rewards, with the wrappers named above." in (folder / "README.md").read_text()
    folder = pack(trained(env=gym.make("Pendulum-v1", g=2.0, render_mode="rgb_array"), steps=0))
    assert "own rewards, neither normalized nor clipped." in (folder / "README.md").read_text()
    assert run_snippet(folder, monkeypatch)["env"].get_attr("g") == [2.0]
    assert yaml.safe_load((folder / "env_kwargs.yml").read_text()) == {"g": 2.0}


def test_the_run_is_published_without_anything_of_the_authors_machine(pack, tmp_path, monkeypatch):
    """Every byte of every file, of zip entries and of pickles; every CSV file was published."""
    home = tmp_path / "alice_q7x"
    run = home / "run"
    for name in ("HOME", "USER", "LOGNAME", "USERNAME"):
        monkeypatch.setenv(name, str(home))
    for function in ("platform.node", "socket.gethostname"):
        monkeypatch.setattr(function, lambda: "host_q7x")
    env = VecNormalize(make_vec_env("CartPole-v1", 2, backend="gymnasium", monitor_dir=run))
    model = trained(env=env, policy_kwargs={"net_arch": [8], "activation_fn": torch.nn.ReLU}, steps=0)
    model.learn(256)
    model.tensorboard_log = str(home / "tensorboard")
    model.ep_info_buffer[0]["file"] = str(home / "maze.npz")  # as Monitor(info_keywords=("file",)) does
    env.close()
    (run / "CartPole-v1").mkdir()
    config = "policy: MlpPolicy\nnormalize: false\n"
    for name in ("evaluations.npz", "progress.csv", "CartPole-v1/config.yml"):
        (run / name).write_text(config)
    for name in ("private_notes.csv", "other.npz", "CartPole-v1/args.yml"):
        (run / name).write_text(f"path: {home}\n")
    folder = pack(model, run=run, video=True, video_length=3)
    assert model.tensorboard_log == str(home / "tensorboard"), "the author's model was changed"
    for archive in folder.glob("*.zip"):
        shutil.unpack_archive(archive, tmp_path / "unpacked" / archive.name)
    found = {path: path.read_bytes() for path in [*folder.iterdir(), *tmp_path.glob("unpacked/*/*")]}
    assert {"ano-CartPole-v1.zip", "data", "policy.pth", "progress.csv", "vec_normalize.pkl"} <= {path.name for path in found}
    pickles = re.findall(rb'":serialized:": "(.+?)"', found[tmp_path / "unpacked" / "ano-CartPole-v1.zip" / "data"])
    assert len(pickles) > 3, "in SB3's JSON"
    private = [b"q7x", str(tmp_path).encode(), str(ROOT).encode(), str(Path.cwd()).encode()]
    assert not [data for data in (*found.values(), *map(base64.b64decode, pickles)) if any(text in data for text in private)]
    assert (folder / "config.yml").read_text() == config
    arguments = yaml.safe_load((folder / "args.yml").read_text())
    expected = {"algo": "ano", "device": model.device.type, "env": "CartPole-v1", "env_kwargs": {}, "n_timesteps": 256}
    assert arguments == expected | {"seed": 0}
    logs = {"0.monitor.csv", "1.monitor.csv", "evaluations.npz", "progress.csv"}
    assert {path.name for path in tmp_path.glob("unpacked/train_eval_metrics.zip/*")} == logs


def test_a_package_is_replaced_even_by_one_of_another_task(cartpole, pendulum, pack, tmp_path):
    folder = pack(cartpole, run=tmp_path)
    assert pack(pendulum) == folder
    assert {path.name for path in folder.glob("*.zip")} == {"ano-Pendulum-v1.zip", "train_eval_metrics.zip"}
    (folder / "mine.zip").touch()
    with pytest.raises(FileExistsError, match=r"mine.zip"):
        pack(cartpole)
    for file in folder.iterdir():
        file.unlink()
    for name in ("ano-best.zip", "README.md", "config.yml"):  # a user's own, without our card
        (folder / name).touch()
        with pytest.raises(FileExistsError, match=name):
            pack(cartpole)
        (folder / name).unlink()


def test_hyperparameters_are_plain_values(pack):
    schedules = {"clip_range": LinearSchedule(0.2, 0.0, 1.0), "learning_rate": LinearSchedule(1e-3, 1e-4, 0.5)}
    model = trained(steps=0, clip_range_high=0.3, policy_kwargs={"activation_fn": torch.nn.ReLU}, **schedules)
    folder = pack(model)
    found = json.loads((folder / "README.md").read_text().split("```json\n")[1].split("```")[0])
    assert yaml.safe_load((folder / "config.yml").read_text()) == found
    expected = {"clip_range": "lin_0.2", "clip_range_high": 0.3, "policy_kwargs": "{'activation_fn': nn.ReLU}"}
    expected |= {"learning_rate": {"start": 0.001, "end": 0.0001, "end_fraction": 0.5}}
    expected |= {"shaping": "ano", "normalize": False, "policy": "MlpPolicy", "n_envs": 1, "n_steps": SMALL["n_steps"]}
    assert found == found | expected
    assert not {"env", "device", "verbose", "seed"} & set(found)


@pytest.mark.parametrize(("cls", "policy"), [(MaskableANO, "MlpPolicy"), (RecurrentMaskableANO, "MlpLstmPolicy")])
def test_the_card_of_an_agent_with_masks_evaluates_it_with_masks(cls, policy, pack, monkeypatch):
    # The environment raises if an action is not allowed. sb3-contrib's evaluate_policy would lose the states of the LSTM.
    spec = gym.envs.registration.EnvSpec("TwoAllowed-v0", "tests.tiny_envs:TwoAllowed")
    monkeypatch.setitem(gym.registry, spec.id, spec)
    model = trained(cls, make_vec_env(spec.id, backend="gymnasium"), policy, steps=0)
    for parameter in model.policy.parameters():  # larger than at the start, so that the states decide about actions
        torch.nn.init.normal_(parameter)
    folder = pack(model)
    run_snippet(folder, monkeypatch)
    assert code_of(folder).startswith("import tests.tiny_envs\nimport gymnasium as gym\n\nif 'TwoAllowed-v0' not in gym.reg")
    assert "masks" not in (pack(trained(steps=0)) / "README.md").read_text()


# imageio's reader leaves the pipes of its ffmpeg open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_video_shows_every_frame_at_the_environments_speed_and_plays_in_browsers(cartpole, pack, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no ffmpeg on the path is needed
    path = pack(cartpole, video=True, video_length=70, seed=3) / "replay.mp4"
    about, *frames = imageio_ffmpeg.read_frames(str(path))
    assert (about["codec"], about["fps"], about["pix_fmt"][:7], len(frames)) == ("h264", 50, "yuv420p", 70)
    env = gym.make("CartPole-v1", render_mode="rgb_array")
    observation, _ = env.reset(seed=3)
    for frame in frames:  # by gymnasium's own loop; the cart's lines are thin, and a compressed line is blurred
        assert np.abs(np.frombuffer(frame, np.uint8).reshape(400, 600, 3).astype(float) - env.render()).mean() < 1.0
        observation, *_, truncated, _ = env.step(cartpole.predict(observation, deterministic=True)[0])
        assert not truncated
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat"), "a browser would have to load all of it before it plays"


@pytest.mark.parametrize(("given", "used"), [({}, "egl"), ({"MUJOCO_GL": "osmesa"}, "osmesa"), ({"DISPLAY": ":0"}, None)])
def test_mujoco_renders_through_egl_without_a_display_unless_the_user_says_otherwise(given, used, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    with mock.patch.dict(os.environ, given, clear=True):
        with software_rendering():
            assert os.environ.get("MUJOCO_GL") == used
        assert os.environ == given


@pytest.mark.parametrize("n_frames", [0, 2])
def test_without_frames_the_push_continues_and_says_why(n_frames, cartpole, pack, capsys, monkeypatch):
    answers = [*[np.zeros((64, 64, 3), np.uint8)] * n_frames, OSError("no graphics\nlibrary")]
    monkeypatch.setattr("gymnasium.envs.classic_control.CartPoleEnv.render", mock.Mock(side_effect=answers))
    folder = pack(cartpole, video=True)
    assert capsys.readouterr().out == "no video: the environment does not render: OSError: no graphics library\n"
    assert not (folder / "replay.mp4").exists()
    assert "<video" not in (folder / "README.md").read_text()
