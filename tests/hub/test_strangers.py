"""What is published works for a stranger.

The code of each card runs as printed, in an empty directory and a process of its own, with what the card says that it needs
and nothing else. A training from ``config.yml`` and ``args.yml`` ends with the parameters of the published agent.
"""

import importlib
import json
import re
import shutil
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from gymnasium.wrappers import ClipReward, TimeAwareObservation
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env as sb3_make_vec_env
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize, unwrap_vec_normalize

from sb3_ano import ANO, PAPO, SPO, MaskableANO, RecurrentANO, RecurrentMaskableANO
from sb3_ano._registry import ALGORITHMS
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import package
from tests.common import SMALL, parameters
from tests.hub.strangers import stranger
from tests.zoo.conftest import run

# Optimizers and policies of these tests are custom ones.
pytestmark = pytest.mark.filterwarnings("ignore:this training leaves the fast path")

#: The author's code, which nobody else has: environments, which importing the package registers, and parts.
ENVIRONMENTS = """
import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Line(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, length=1.0, file=None, render_mode=None):
        self.length, self.file, self.render_mode = length, file, render_mode
        self.observation_space = spaces.Box(-length, length, (3,), np.float32)
        self.action_space = spaces.Discrete(4)

    def _observe(self):
        return self.np_random.uniform(-self.length, self.length, 3).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.seen = self._observe()
        return self.seen, {}

    def step(self, action):
        reward = float(self.seen[0] * (action - 1.5))
        self.steps += 1
        self.seen = self._observe()
        return self.seen, reward, False, False, {}

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


class Dictionary(Line):
    def __init__(self, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.plain = self.observation_space
        self.observation_space = spaces.Dict({"place": self.plain, "other": self.plain, "kind": spaces.Discrete(3)})

    def _observe(self):
        place = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return {"place": place, "other": place / 2, "kind": self.np_random.integers(3)}

    def step(self, action):
        seen = self.seen
        self.seen = seen["place"]
        return super().step(action)


class Masked(Line):
    def action_masks(self):
        return (np.arange(4) - self.steps) % 4 < 2

    def step(self, action):
        assert (action - self.steps) % 4 < 2
        return super().step(action)


class Doubled(gym.ObservationWrapper):
    def observation(self, observation):
        return 2 * observation


class Scaled(gym.RewardWrapper, gym.utils.RecordConstructorArgs):
    def __init__(self, env, factor):
        gym.utils.RecordConstructorArgs.__init__(self, factor=factor)
        super().__init__(env)
        self.factor = factor

    def reward(self, reward):
        return self.factor * reward
"""
PARTS = '''
import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor


class Sine(FlattenExtractor):
    def forward(self, observations):
        return torch.sin(3 * super().forward(observations))


class Policy(ActorCriticPolicy):
    """An author's policy."""


class Cubed(torch.nn.Module):
    def forward(self, x):
        return x**3


class Descent(torch.optim.SGD):
    def __init__(self, *arguments, eps=1e-5, **options):
        super().__init__(*arguments, **options)


def shape(x):
    return 1 + x - torch.sqrt(1 + x.square())


def schedule(progress_remaining):
    return 1e-3 * progress_remaining**0.5
'''
REGISTER = """
import gymnasium as gym

for name in ("Line", "Dictionary", "Masked"):
    gym.register(f"{name}-v0", f"{__name__}.environments:{name}", max_episode_steps=20)
"""


@pytest.fixture(scope="module")
def author(tmp_path_factory):
    """A directory with the author's packages, from which this process imports them."""
    directory = tmp_path_factory.mktemp("author_q7x")
    files = {
        "linepark/__init__.py": REGISTER,
        "linepark/environments.py": ENVIRONMENTS,
        "lineparts/__init__.py": "",
        "lineparts/parts.py": PARTS,
    }
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content)
    sys.path.insert(0, str(directory))
    importlib.import_module("linepark.environments")
    importlib.import_module("lineparts.parts")
    yield directory
    sys.path.remove(str(directory))
    for name in [name for name in sys.modules if name.startswith(("linepark", "lineparts"))]:
        del sys.modules[name]
    for name in ("Line-v0", "Dictionary-v0", "Masked-v0"):
        gym.registry.pop(name, None)


@pytest.fixture(scope="module")
def run_there():
    with stranger() as run_program:
        yield run_program


def environments():
    return sys.modules["linepark.environments"]


def parts():
    return sys.modules["lineparts.parts"]


def envs(env_id="Line-v0", n_envs=2, **options):
    return make_vec_env(env_id, n_envs, backend="gymnasium", **options)


def everything_normalized():
    options = {"norm_obs_keys": ["place"], "clip_obs": 0.7, "clip_reward": 2.0, "gamma": 0.8, "epsilon": 1e-3}
    return VecNormalize(envs("Dictionary-v0"), **options)


def atari_as_sb3():
    arguments = {"noop_max": 3, "screen_size": 64, "terminal_on_life_loss": False}
    options = {"wrapper_class": AtariWrapper, "wrapper_kwargs": arguments, "env_kwargs": SHORT_GAME}
    return VecFrameStack(sb3_make_vec_env("PongNoFrameskip-v4", **options), 2)


SCHEDULES = {
    "learning_rate": LinearSchedule(1e-3, 1e-4, 0.5),
    "clip_range": "lin_0.3",
    "clip_range_high": LinearSchedule(0.4, 0.1, 1.0),
    "clip_range_vf": "lin_0.5",
}
NETWORK = {"net_arch": {"pi": [8], "vf": [4]}, "activation_fn": torch.nn.SiLU, "optimizer_class": torch.optim.SGD}
NETWORK |= {"optimizer_kwargs": {"momentum": 0.5}, "log_std_init": -0.5, "ortho_init": False}
LSTM = {"lstm_hidden_size": 8}
#: Functions that return class, environments, policy and arguments of an agent.
AGENTS = {
    "ano": lambda: (ANO, "CartPole-v1", "MlpPolicy", {}),
    "spo": lambda: (SPO, envs("Pendulum-v1", 3), "MlpPolicy", {"use_sde": True, "sde_sample_freq": 4, "n_epochs": 3}),
    "papo": lambda: (PAPO, envs("CartPole-v1"), "MlpPolicy", {"k": 3.0, "omega1": 0.01, "max_epoch_kl": None}),
    "extractor": lambda: (ANO, envs(), "MlpPolicy", {"policy_kwargs": {"features_extractor_class": parts().Sine}}),
    "policy": lambda: (ANO, envs("CartPole-v1"), parts().Policy, {"policy_kwargs": {"activation_fn": parts().Cubed}}),
    "optimizer": lambda: (ANO, envs("CartPole-v1"), "MlpPolicy", {"policy_kwargs": {"optimizer_class": parts().Descent}}),
    "shape": lambda: (ANO, envs("CartPole-v1"), "MlpPolicy", {"shaping": parts().shape}),
    "two shapes": lambda: (ANO, envs("CartPole-v1"), "MlpPolicy", {"shaping": ("ano", parts().shape), "clip_range_high": 0.4}),
    "dict": lambda: (ANO, envs("Dictionary-v0"), "MultiInputPolicy", {}),
    "everything normalized": lambda: (SPO, everything_normalized(), "MultiInputPolicy", {"gamma": 0.95}),
    "rewards normalized": lambda: (ANO, VecNormalize(envs(), norm_obs=False, clip_reward=np.inf), "MlpPolicy", {}),
    "masks": lambda: (MaskableANO, envs("Masked-v0"), "MlpPolicy", {}),
    "lstm": lambda: (RecurrentANO, envs(), "MlpLstmPolicy", {"policy_kwargs": LSTM}),
    "masked lstm": lambda: (
        RecurrentMaskableANO,
        envs("Masked-v0"),
        "MlpLstmPolicy",
        {"policy_kwargs": {"lstm_hidden_size": 8}},
    ),
    "stack": lambda: (ANO, VecFrameStack(VecNormalize(envs()), 3), "MlpPolicy", {}),
    "inner stack": lambda: (ANO, VecNormalize(VecFrameStack(envs(), 3)), "MlpPolicy", {}),
    "schedules": lambda: (ANO, envs("CartPole-v1"), "MlpPolicy", SCHEDULES),
    "custom schedule": lambda: (ANO, envs("CartPole-v1"), "MlpPolicy", {"learning_rate": parts().schedule}),
    "desired kl": lambda: (ANO, envs("CartPole-v1"), "MlpPolicy", {"desired_kl": "lin_0.02", "target_kl": 0.5}),
    "network": lambda: (ANO, envs("Pendulum-v1"), "MlpPolicy", {"policy_kwargs": NETWORK, "max_grad_norm": float("inf")}),
    "buffer": lambda: (ANO, envs("CartPole-v1"), "MlpPolicy", {"rollout_buffer_class": RolloutBuffer, "check_finite": False}),
    "settings": lambda: (ANO, envs(env_kwargs={"length": 3.0}), "MlpPolicy", {"normalize_advantage": False}),
    "wrappers": lambda: (ANO, envs(wrapper_class=wrapped), "MlpPolicy", {}),
    "gymnasium's wrappers": lambda: (ANO, envs("Pendulum-v1", wrapper_class=timed), "MlpPolicy", {}),
    "limit": lambda: (ANO, gym.make("Line-v0", max_episode_steps=7), "MlpPolicy", {}),
    "atari": lambda: (ANO, make_vec_env("PongNoFrameskip-v4", 1, backend="gymnasium", env_kwargs=SMALL_GAME), "CnnPolicy", {}),
    "atari of sb3": lambda: (ANO, atari_as_sb3(), "CnnPolicy", {}),
}
SMALL_GAME = {"frame_stack": 2, "screen_size": 64, "episodic_life": False, "max_frames": 400}
SHORT_GAME = {"max_num_frames_per_episode": 400}
#: Agents that are evaluated in environments which only their author can build: Python for these, for the reader's program.
BUILT = {
    "stack": "import linepark\nfrom stable_baselines3.common.vec_env import VecFrameStack, VecNormalize\n"
    "from sb3_ano.envs import make_vec_env\nenv = VecFrameStack(VecNormalize(make_vec_env('Line-v0')), 3)\nenv.seed(0)\n",
    "inner stack": "import linepark\nfrom stable_baselines3.common.vec_env import VecFrameStack\n"
    "from sb3_ano.envs import make_vec_env\nenv = VecFrameStack(make_vec_env('Line-v0'), 3)\nenv.seed(0)\n",
    "wrappers": "import linepark\nfrom linepark.environments import Doubled, Scaled\nfrom sb3_ano.envs import make_vec_env\n"
    "env = make_vec_env('Line-v0', wrapper_class=lambda env: Scaled(Doubled(env), factor=0.5), seed=0)\n",
    "gymnasium's wrappers": "from gymnasium.wrappers import ClipReward, TimeAwareObservation\n"
    "from sb3_ano.envs import make_vec_env\n"
    "wrapped = lambda env: ClipReward(TimeAwareObservation(env, normalize_time=True), -2.0, 0.0)\n"
    "env = make_vec_env('Pendulum-v1', wrapper_class=wrapped, seed=0)\n",
    "limit": "import gymnasium, linepark\nenv = gymnasium.make('Line-v0', max_episode_steps=7)\nenv.reset(seed=0)\n",
    "atari of sb3": "from stable_baselines3.common.atari_wrappers import AtariWrapper\n"
    "from stable_baselines3.common.env_util import make_vec_env\nfrom stable_baselines3.common.vec_env import VecFrameStack\n"
    "import ale_py\narguments = {'noop_max': 3, 'screen_size': 64, 'terminal_on_life_loss': False}\n"
    "options = {'wrapper_class': AtariWrapper, 'wrapper_kwargs': arguments}\n"
    "options['env_kwargs'] = {'max_num_frames_per_episode': 400}\n"
    "env = VecFrameStack(make_vec_env('PongNoFrameskip-v4', **options), 2)\nenv.seed(0)\n",
}
#: Wrappers that config.yml only names.
ONLY_NAMED = {
    "inner stack": "VecFrameStack",
    "wrappers": "Scaled.*Doubled",
    "gymnasium's wrappers": "ClipReward.*TimeAwareObservation",
    "atari of sb3": "what its id does not make",
}


def wrapped(env):
    return environments().Scaled(environments().Doubled(env), factor=0.5)


def timed(env):
    return ClipReward(TimeAwareObservation(env, normalize_time=True), -2.0, 0.0)


def published(name, hub, directory):
    """Train an agent, and put its package on the Hub as a push does."""
    kind, env, policy, options = AGENTS[name]()
    arguments = {**SMALL, **options, "policy_kwargs": {"net_arch": [8], **options.get("policy_kwargs", {})}}
    if policy == "CnnPolicy":
        arguments["policy_kwargs"] = {"net_arch": [8], "features_extractor_class": FlattenExtractor}
    model = kind(policy, env, **arguments).learn(128)
    given = reader_env(name)
    episodes = 1 if policy == "CnnPolicy" else 2
    folder = package(model, directory / "package", "somebody/agent", given, n_eval_episodes=episodes, video=False, verbose=0)
    hub.add("somebody/agent", {path.name: path.read_bytes() for path in folder.iterdir()})
    return model, folder


def reader_env(name):
    names: dict = {}
    exec(BUILT.get(name, ""), names)
    return names.get("env")


def code_of(card):
    return card.split("```python\n")[1].split("```")[0]


def bring(card, author, directory):
    """Copy the modules that the card asks for into the reader's directory."""
    for module in re.findall(r"^- `import ([\w.]+)`: ", card, re.MULTILINE):
        root = module.partition(".")[0]
        if (author / root).is_dir():
            shutil.copytree(author / root, directory / root, dirs_exist_ok=True)


@pytest.mark.filterwarnings("ignore:.*(stored by name only|is another function|not a lower bound):UserWarning")
@pytest.mark.parametrize("name", AGENTS)
def test_what_is_published_runs_as_printed_and_trains_again(name, author, hub, run_there, tmp_path, monkeypatch):
    if "atari" in name:
        pytest.importorskip("ale_py")
    model, folder = published(name, hub, tmp_path)
    card, results = (folder / "README.md").read_text(), json.loads((folder / "results.json").read_text())
    reader = tmp_path / "reader"
    reader.mkdir()
    bring(card, author, reader)
    given = "".join(f"import os; os.environ[{key!r}] = {value!r}\n" for key, value in hub.variables.items())
    given += "from huggingface_hub import constants as c\n"
    given += f"c.HUGGINGFACE_CO_URL_TEMPLATE = c.HUGGINGFACE_CO_URL_TEMPLATE.replace(c.ENDPOINT, {hub.url!r})\n"
    given += f"c.ENDPOINT = {hub.url!r}; c.HF_HUB_CACHE = {str(tmp_path / 'cache')!r}\n"
    assert ("build it as the author did, as `env`" in card) == (name in BUILT)
    if name in BUILT and "linepark" in BUILT[name]:
        shutil.copytree(author / "linepark", reader / "linepark", dirs_exist_ok=True)

    printed = run_there(reader, given + BUILT.get(name, "") + code_of(card))
    assert f"{results['mean_reward']:.2f} +/- {results['std_reward']:.2f}" in printed.splitlines(), printed

    if name in ONLY_NAMED:
        note = (folder / "config.yml").read_text().splitlines()[0]
        assert re.fullmatch(rf"# The environment had .*{ONLY_NAMED[name]}.*; of these, this file has .* at most\.", note)
        return

    trained = trained_again(folder, tmp_path, monkeypatch)
    assert torch.equal(parameters(trained), parameters(model))
    normalized = unwrap_vec_normalize(model.get_env())
    if normalized is not None:
        (pickle,) = tmp_path.glob("logs/*/*/*/vecnormalize.pkl")
        again = VecNormalize.load(str(pickle), normalized.venv)
        for option in ("norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon", "norm_obs_keys"):
            assert getattr(again, option) == getattr(normalized, option), option
        assert again.ret_rms.var == normalized.ret_rms.var
    model.get_env().close()


def trained_again(folder, directory, monkeypatch):
    """Train as config.yml and args.yml say, with the zoo."""
    config = yaml.safe_load((folder / "config.yml").read_text())
    arguments = yaml.safe_load((folder / "args.yml").read_text())
    (directory / "config.yml").write_text(yaml.safe_dump({arguments["env"]: config}))
    monkeypatch.chdir(directory)
    packages = "".join(f" {name}" for name in arguments.get("gym_packages", []))
    options = f"--eval-freq -1 --seed {arguments['seed']} --device {arguments['device']} -f logs"
    options += f" --gym-packages{packages}" if packages else ""
    run(f"train --algo {arguments['algo']} --env {arguments['env']} -conf config.yml {options}")
    (saved,) = (directory / "logs").glob(f"*/*_1/{arguments['env']}.zip")
    return ALGORITHMS[arguments["algo"]].algorithm.load(saved)
