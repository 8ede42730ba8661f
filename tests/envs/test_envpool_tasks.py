"""EnvPool's tasks of other kinds than Atari and MuJoCo, next to the environments' own Python form."""

import csv
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

from sb3_ano.envs import make_vec_env
from sb3_ano.envs.vec_env import envpool_family, register_envpool
from tests.common import ROOT
from tests.envs.backends import needs_envpool

pytestmark = needs_envpool

#: One task of each kind of spaces, and the kinds.
KINDS = {
    "MiniGrid-DoorKey-5x5-v0": ("Dict", "Discrete"),
    "HumanoidStand-v1": ("Dict", "Box 21 float32"),  # with a single number
    "BinPack-v2": ("Dict", "MultiDiscrete 2 int64"),  # nested; it ignores seeds
    "TSP-v1": ("Dict", "Discrete"),  # a number that starts at -1
    "FrozenLake-v1": ("Discrete int64", "Discrete"),
    "Blackjack-v1": ("Box 3 int32", "Discrete"),
    "Play2048-v1": ("MultiBinary 4x4x31 int8", "Discrete"),
}


def test_tasks_of_all_kinds_keep_the_contract_and_train(tmp_path):
    file = tmp_path / "rows.csv"
    script = [sys.executable, ROOT / "benchmarks/envpool_tasks.py", file]
    subprocess.run([*script, "--tasks", *KINDS, "Go9x9-v1"], check=True, capture_output=True)
    with file.open(newline="") as lines:
        rows = {row["task"]: row for row in csv.DictReader(lines)}

    assert rows.pop("Go9x9-v1")["result"] == "one line"
    for task, (observations, actions) in KINDS.items():
        row = rows[task]
        assert row["result"] in ("works", "works, ignores seeds"), row
        assert (row["observations"], row["actions"].startswith(actions)) == (observations, True)

    # The same command resumes.
    table = subprocess.run([*script, "--tasks", "Go9x9-v1"], check=True, capture_output=True, text=True).stdout
    assert "| Pgx | 19 | 1 | 0 | 1 | 0 |" in table
    assert "| all | 1651 | 7 | " in table


def test_nested_observations_have_names_with_slashes_and_single_numbers_a_dimension():
    env = make_vec_env("BinPack-v2", 2, seed=0, backend="envpool")
    with pytest.warns(UserWarning, match="BinPack-v2 ignores seeds"):
        observations = env.reset()
    assert list(observations) == list(env.observation_space) == sorted(env.observation_space)
    assert {"ems/x1", "ems_mask", "items/x_len"} < set(env.observation_space)
    env.close()

    env = make_vec_env("HumanoidStand-v1", 2, seed=0)
    assert env.backend == "envpool"
    assert env.observation_space["head_height"] == gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    assert env.reset()["head_height"].shape == (2, 1)
    env.close()

    # Its "images" are no pixels, for which SB3 would take a convolutional network.
    env = make_vec_env("MiniGrid-DoorKey-5x5-v0", 2, seed=0)
    assert env.observation_space["image"] == gym.spaces.Box(0, 10, (7, 7, 3), np.uint8)
    env.close()


def test_integers_are_actions_from_zero():
    env = make_vec_env("Cleaner-v0", 2, backend="envpool")
    env.reset()
    env.step(np.full((2, 3), 3))
    with pytest.raises(ValueError, match="are not in MultiDiscrete"):
        env.step(np.full((2, 3), 4))
    env.close()


def test_ids_that_only_envpool_has_are_registered_on_demand_and_gymnasium_does_not_make_them(monkeypatch):
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    monkeypatch.setattr(gym, "registry", gym.envs.registration.registry)
    for env_id, family in {"CheetahRun-v1": "envpool.mujoco.dmc", "Pong-v5": None, "CartPole-v1": None}.items():
        assert envpool_family(env_id) == family
        register_envpool(env_id)
    assert "Pong-v5" not in gym.registry
    assert envpool_family("CheetahRun-v1") == "envpool.mujoco.dmc"
    assert make_vec_env("CheetahRun-v1").backend == "envpool"
    with pytest.raises(ValueError, match="only EnvPool has this environment"):
        make_vec_env("CheetahRun-v1", backend="gymnasium")


@pytest.mark.filterwarnings("ignore:EnvPool's CliffWalking-v1 ignores seeds")  # it always starts in the same state
@pytest.mark.parametrize("env_id", ["CliffWalking-v1", "Taxi-v3", "FrozenLake-v1"])
def test_toy_text_is_gymnasiums(env_id):
    env = make_vec_env(env_id, 8, seed=1, backend="envpool")
    theirs = gym.make(env_id.replace("Taxi-v3", "Taxi-v4")).unwrapped  # gymnasium no longer has v3
    assert (env.observation_space, env.action_space) == (theirs.observation_space, theirs.action_space)
    random = np.random.default_rng(0)
    before = env.reset()
    assert before.dtype == env.observation_space.dtype
    ended = 0

    for _ in range(400):
        actions = random.integers(theirs.action_space.n, size=8)
        observations, rewards, dones, infos = env.step(actions)
        for index in range(8):
            after = infos[index].get("terminal_observation", observations[index])
            terminated = bool(dones[index]) and not infos[index]["TimeLimit.truncated"]
            # Of all that can follow in gymnasium's model; FrozenLake slips.
            allowed = [outcome[1:] for outcome in theirs.P[int(before[index])][actions[index]]]
            assert (int(after), rewards[index], terminated) in [(int(s), float(r), bool(t)) for s, r, t in allowed]
            ended += dones[index]
        before = observations
    assert ended > 8 or env_id == "CliffWalking-v1"  # whose goal random actions do not find
    env.close()


@pytest.mark.parametrize(("env_id", "n_layouts"), [("MiniGrid-Empty-8x8-v0", 1), ("MiniGrid-DoorKey-5x5-v0", 150)])
def test_minigrid_is_the_python_packages(env_id, n_layouts):
    pytest.importorskip("minigrid", reason="minigrid is not installed")
    env = make_vec_env(env_id, 1, seed=3, backend="envpool")
    random = np.random.default_rng(0)
    observations = env.reset()
    ends = set()

    for _ in range(8):
        # The same layout among those that the package draws.
        alike = []
        for seed in range(n_layouts):
            candidate = gym.make(env_id)
            first, _ = candidate.reset(seed=seed)
            if is_minigrids(first, observations):
                alike.append(candidate)
        assert alike

        done = False
        while not done:
            # Forward more often than the others, to get somewhere.
            action = int(random.choice([0, 1, 2, 2, 2, 3, 5, 5]))
            observations, rewards, dones, infos = env.step(np.array([action]))
            done = dones[0]
            last = {key: part[0] for key, part in observations.items()}
            last = infos[0].get("terminal_observation", last)
            truncated = infos[0]["TimeLimit.truncated"]

            # What was out of sight may differ.
            still = []
            for candidate in alike:
                theirs, reward, *flags, _ = candidate.step(action)
                same = flags == [done and not truncated, truncated] and abs(reward - rewards[0]) < 1e-6
                if same and is_minigrids(theirs, {key: part[None] for key, part in last.items()}):
                    still.append(candidate)
            alike = still
            assert alike
        ends.add(bool(truncated))
    assert ends == {False, True} or env_id.startswith("MiniGrid-Door")
    env.close()


def is_minigrids(theirs: dict, ours: dict) -> bool:
    """Tell whether an observation of the Python package is EnvPool's first one."""
    mission = bytes(ours["mission"][0]).rstrip(b"\0").decode()
    same_image = np.array_equal(theirs["image"], ours["image"][0])
    return same_image and theirs["direction"] == ours["direction"][0] and theirs["mission"] == mission


def angle(orientation: np.ndarray) -> float:
    return np.arctan2(orientation[1], orientation[0])


#: DM Control's name of a task, and positions and velocities of the state by what EnvPool observes.
DM_CONTROL = {
    "PointMassEasy-v1": ("point_mass", "easy", lambda first: (first["position"], first["velocity"])),
    "BallInCupCatch-v1": ("ball_in_cup", "catch", lambda first: (first["position"], first["velocity"])),
    "CheetahRun-v1": ("cheetah", "run", lambda first: ([0.0, *first["position"]], first["velocity"])),
    "PendulumSwingup-v1": ("pendulum", "swingup", lambda first: ([angle(first["orientation"])], first["velocity"])),
    "CartpoleSwingup-v1": (
        "cartpole",
        "swingup",
        lambda first: ([first["position"][0], angle(first["position"][1:])], first["velocity"]),
    ),
}


@pytest.mark.parametrize("env_id", DM_CONTROL)
def test_dm_control_is_the_python_packages(env_id):
    suite = pytest.importorskip("dm_control.suite", reason="dm_control is not installed")
    domain, task, state_of = DM_CONTROL[env_id]
    env = make_vec_env(env_id, 1, seed=5)
    theirs = suite.load(domain, task)
    random = np.random.default_rng(0)
    observations = env.reset()

    theirs.reset()
    with theirs.physics.reset_context():
        positions, velocities = state_of({key: part[0] for key, part in observations.items()})
        theirs.physics.data.qpos[:] = positions
        theirs.physics.data.qvel[:] = velocities

    for step in range(1, 1001):
        actions = random.uniform(env.action_space.low, env.action_space.high, (1, *env.action_space.shape))
        observations, rewards, dones, infos = env.step(actions.astype(np.float32))
        expected = theirs.step(actions[0].astype(np.float32))
        ours = {key: part[0] for key, part in observations.items()}
        ours = infos[0].get("terminal_observation", ours)
        for key, part in expected.observation.items():
            np.testing.assert_allclose(ours[key], np.atleast_1d(part), atol=1e-5, rtol=1e-5, err_msg=f"{key}, step {step}")
        assert rewards[0] == pytest.approx(expected.reward, abs=1e-5)
        assert dones[0] == expected.last()
        # DM Control's discount is 1 where the time is over.
        assert infos[0]["TimeLimit.truncated"] == (expected.last() and expected.discount == 1.0)
    assert dones[0]
    env.close()
