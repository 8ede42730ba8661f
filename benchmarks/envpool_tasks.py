"""Count, family by family, which of EnvPool's tasks work as environments of Stable-Baselines3:

    python benchmarks/envpool_tasks.py envpool_tasks.csv
    python benchmarks/envpool_tasks.py envpool_tasks.csv --report

A task works if ``make_vec_env`` makes two environments, 200 random steps keep SB3's contract for vectorized environments, and
ANO trains on one rollout. The steps have a time limit of 40, so that episodes end. The first episode is compared with that of
EnvPool alone with a later limit, or the same one where rewards or observations depend on it: every observation and reward,
and also the last observation, which SB3 bootstraps from. "no time limit" next to a task that works says that the limit
has no effect.

Each task has a process of its own, with limits of time and memory. A row is written per task. The same command resumes.
"""

import argparse
import csv
import multiprocessing
import resource
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import envpool
import numpy as np
import torch
from envpool.registration import registry
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecEnv
from tqdm import tqdm

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env

STEPS = 200
TIME_LIMIT = 40
SEED = 7
# Limits of a task's process.
SECONDS = 400
GIGABYTES = 12
ATARI = "envpool.atari"
MINIGRID = "envpool.minigrid"
MYOSUITE = "envpool.mujoco.myosuite"
# Tasks whose observations or rewards depend on which part of the time is over.
DEPEND_ON_TIME = {"AlohaHandOver-v1", "MuJoCoPlayground/AlohaHandOver-v1"}
DEPEND_ON_TIME |= {task for task, (module, *_) in registry.specs.items() if module == MINIGRID}
COLUMNS = ("family", "task", "result", "reason", "observations", "actions", "seconds")
# In the order of the table.
WORKS = "works"
NO_SEEDS = "works, ignores seeds"
ONE_LINE = "one line"
FAILS = "fails"
FAMILIES = {
    ATARI: "Atari",
    "envpool.box2d": "Box2D",
    "envpool.classic_control": "classic control",
    "envpool.mujoco.dmc": "DM Control",
    "envpool.gfootball": "Google Research Football",
    "envpool.highway": "highway-env",
    "envpool.jumanji": "Jumanji",
    "envpool.mujoco.metaworld": "Meta-World",
    MINIGRID: "MiniGrid and BabyAI",
    "envpool.mujoco.gym": "MuJoCo of gymnasium",
    "envpool.mujoco.playground": "MuJoCo Playground",
    MYOSUITE: "MyoSuite",
    "envpool.pgx": "Pgx",
    "envpool.procgen": "Procgen",
    "envpool.mujoco.robotics": "robotics",
    "envpool.toy_text": "toy text",
    "envpool.vizdoom": "VizDoom",
}


def check_task(task: str, connection: Connection) -> None:
    """Check one task, and send the row's ``result``, ``reason``, ``observations`` and ``actions``."""
    gigabytes = GIGABYTES * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (gigabytes, gigabytes))
    torch.set_num_threads(1)
    row = {"result": FAILS, "reason": "", "observations": "", "actions": ""}

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                limit = {"max_episode_steps": TIME_LIMIT}
                if registry.specs[task][0] == ATARI:
                    limit = {"max_frames": 4 * TIME_LIMIT}
                env = make_vec_env(task, 2, seed=SEED, backend="envpool", env_kwargs=limit)
                first = env.reset()
            except ValueError as reason:
                packages = str(Path(envpool.__file__).parents[1])
                connection.send({**row, "result": ONE_LINE, "reason": str(reason).replace(packages, "site-packages")})
                return

            row["observations"] = kind_of(env.observation_space)
            row["actions"] = kind_of(env.action_space)
            if not check_contract(task, env, first):
                row["reason"] = "no time limit"
            check_training(env)
            env.close()

        row["result"] = WORKS
        if any("ignores seeds" in str(warning.message) for warning in caught):
            row["result"] = NO_SEEDS
    except Exception as error:
        row["reason"] = " ".join(f"{type(error).__name__}: {error}".split())
    connection.send(row)


def check_contract(task: str, env: VecEnv, observations: Any) -> bool:
    """Play random actions, and check all that SB3 expects of a step.

    :param task: name of the task in EnvPool
    :param env: two environments that were reset
    :param observations: observations of the reset
    :return: whether the time limit has ended the episodes that reached it
    :raises AssertionError: naming what differs
    """
    has_limit = True
    is_compared = is_sampled(task)
    require_observations(env.observation_space, observations)
    if is_compared:
        limit = 2 * TIME_LIMIT
        if task in DEPEND_ON_TIME:
            limit = TIME_LIMIT
        bare = envpool.make_gymnasium(task, num_envs=1, num_threads=1, seed=[SEED], max_episode_steps=limit)
        require_equal(bare.reset()[0], observations)

    # A lost life ends the learner's episode, but not the score.
    is_atari = registry.specs[task][0] == ATARI
    returns = np.zeros(2)
    lengths = np.zeros(2, int)
    earlier = None
    env.action_space.seed(SEED)

    for _ in range(STEPS):
        actions = np.stack([np.asarray(env.action_space.sample()) for _ in range(env.num_envs)])
        observations, rewards, dones, infos = env.step(actions)
        if earlier is not None:
            np.testing.assert_equal(earlier[0], earlier[1], "a step has overwritten the observations of the last one")
        earlier = (observations, copy_of(observations))

        require_observations(env.observation_space, observations)
        require(rewards.shape == (2,) and rewards.dtype == np.float32, f"rewards of type {rewards.dtype} {rewards.shape}")
        require(np.isfinite(rewards).all(), f"rewards={rewards}")
        require(dones.shape == (2,) and dones.dtype == np.bool_, f"dones of type {dones.dtype} {dones.shape}")
        returns += rewards
        lengths += 1

        for index in range(2):
            info = infos[index]
            require(("terminal_observation" in info) == dones[index], f"terminal_observation with done={dones[index]}")
            require(not info["TimeLimit.truncated"] or dones[index], "truncated, but not done")
            if not dones[index]:
                has_limit = has_limit and lengths[index] < TIME_LIMIT
                continue

            last = info["terminal_observation"]
            require_observations(env.observation_space, by_part(last, lambda part: np.asarray(part)[None]))
            if not is_atari:
                require(info["episode"]["l"] == lengths[index], f"length {info['episode']['l']} of {lengths[index]}")
                require(np.isclose(info["episode"]["r"], returns[index], atol=1e-3), "another return than the rewards' sum")
            returns[index] = 0.0
            lengths[index] = 0

        if is_compared:
            native = actions[:1] + lowest_action(bare.action_space)
            expected, reward, *_ = bare.step(native)
            np.testing.assert_array_equal(reward, rewards[:1])
            if dones[0]:
                is_compared = False
                observations = by_part(infos[0]["terminal_observation"], lambda part: np.asarray(part)[None])
            require_equal(expected, observations)
    return has_limit


def check_training(env: VecEnv) -> None:
    """Train on one rollout."""
    policy = "MlpPolicy"
    if isinstance(env.observation_space, spaces.Dict):
        policy = "MultiInputPolicy"
    elif is_image_space(env.observation_space):
        policy = "CnnPolicy"

    model = ANO(policy, env, n_steps=16, batch_size=32, n_epochs=1)
    model.learn(32)
    for name, parameter in model.policy.named_parameters():
        require(bool(torch.isfinite(parameter).all()), f"after the training, {name} is not finite")


def is_sampled(task: str) -> bool:
    """Tell whether a task is compared with EnvPool alone.

    Atari games, whose settings have other names, are compared in the tests. Of MyoSuite, whose models take long to load,
    one in eight is.
    """
    family = registry.specs[task][0]
    if family == MYOSUITE:
        return sum(task.encode()) % 8 == 0
    return family != ATARI


def require(condition: bool, reason: str) -> None:
    """Raise AssertionError with a reason if a condition does not hold."""
    if not condition:
        raise AssertionError(reason)


def require_observations(space: spaces.Space, observations: Any, name: str = "") -> None:
    """Check type, shape and bounds of the observations of several environments."""
    if isinstance(space, spaces.Dict):
        require(list(observations) == list(space.spaces), f"keys {list(observations)}")
        for key, part in space.spaces.items():
            require_observations(part, observations[key], key)
        return

    shape = observations.shape[1:]
    require(shape == space.shape, f"{name}: observations of shape {shape} in {space}")
    require(observations.dtype == space.dtype, f"{name}: observations of type {observations.dtype} in {space}")
    for observation in observations:
        if not space.contains(observation) and not (np.ndim(observation) == 0 and space.contains(int(observation))):
            text = " ".join(str(observation).split())
            raise AssertionError(f"{name}: {text[:100]} is not in {space}")


def require_equal(expected: Any, observations: Any, prefix: str = "") -> None:
    """Compare EnvPool's nested observations of one environment with the first of ours."""
    if isinstance(expected, dict):
        for key, part in expected.items():
            require_equal(part, observations, f"{prefix}{key}/")
        return

    ours = observations
    if prefix:
        ours = observations.get(prefix[:-1], observations.get(f"{prefix[:-1]}_"))
    theirs = np.ravel(expected[0]).astype(np.float64)
    # Numbers of a Discrete space may start elsewhere.
    difference = theirs - np.ravel(ours[0])
    is_shifted = np.size(theirs) == 1 and abs(difference[0]) == 1.0
    require(bool((difference == 0).all()) or is_shifted, f"{prefix} differs from EnvPool's by {np.abs(difference).max()}")


def lowest_action(space: spaces.Space) -> Any:
    """Return what EnvPool's integers begin with."""
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer):
        return space.low
    return 0


def by_part(observations: Any, function: Any) -> Any:
    """Apply a function to an array, or to each array of a dictionary."""
    if not isinstance(observations, dict):
        return function(observations)
    return {key: function(part) for key, part in observations.items()}


def copy_of(observations: Any) -> Any:
    """Copy observations."""
    return by_part(observations, np.copy)


def kind_of(space: spaces.Space) -> str:
    """Return the class of a space, with shape and type unless it is a dictionary."""
    kind = type(space).__name__
    if isinstance(space, spaces.Dict):
        return kind
    shape = "x".join(map(str, space.shape or ()))
    return " ".join([kind, shape, str(space.dtype)]).replace("  ", " ")


def run_task(task: str) -> dict[str, Any]:
    """Check a task in a process of its own, which may crash or take too long, and return its row."""
    started = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=check_task, args=(task, sender))
    process.start()
    sender.close()

    row: dict[str, Any] = {"result": FAILS}
    if receiver.poll(SECONDS):
        try:
            row = receiver.recv()
        except EOFError:
            process.join()
            row["reason"] = f"ends the process with exit code {process.exitcode}"
    else:
        row["reason"] = f"no answer after {SECONDS} seconds"
    process.kill()
    process.join()

    family = FAMILIES[registry.specs[task][0]]
    return {"family": family, "task": task, **row, "seconds": round(time.monotonic() - started, 1)}


def read_rows(file: Path) -> list[dict[str, str]]:
    """Read the rows that were written."""
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def write_rows(file: Path, rows: list[dict[str, str]]) -> None:
    """Write all rows."""
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def report(rows: list[dict[str, str]]) -> str:
    """Return the table of the docs."""
    lines = [
        "| family | tasks | work | of these, ignore seeds | one line | fail | not checked |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    total = [0] * 6
    for module, family in FAMILIES.items():
        tasks = [task for task, (path, *_) in registry.specs.items() if path == module]
        results = [row["result"] for row in rows if row["family"] == family]
        works = results.count(WORKS) + results.count(NO_SEEDS)
        unchecked = len(tasks) - len(results)
        counts = [len(tasks), works, results.count(NO_SEEDS), results.count(ONE_LINE), results.count(FAILS), unchecked]
        total = list(np.add(total, counts))
        lines.append(f"| {family} | {' | '.join(map(str, counts))} |")
    lines.append(f"| all | {' | '.join(map(str, total))} |")
    return "\n".join(lines)


def main() -> None:
    """Check the tasks without a row, or show the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0].rstrip(":"))
    parser.add_argument("file", type=Path, help="CSV file of rows")
    parser.add_argument("--tasks", nargs="+", help="names of tasks; default: all")
    parser.add_argument("--limit", type=int, help="number of tasks to check now")
    parser.add_argument("--retry", action="store_true", help="check the tasks again that failed")
    parser.add_argument("--report", action="store_true", help="only show the table")
    options = parser.parse_args()

    rows = read_rows(options.file)
    if options.report:
        print(report(rows))
        return
    if options.retry:
        rows = [row for row in rows if row["result"] != FAILS]
    write_rows(options.file, rows)

    # Small families first: an interrupted run has seen most of them.
    sizes: dict[str, int] = {}
    for module, *_ in registry.specs.values():
        sizes[module] = sizes.get(module, 0) + 1
    tasks = options.tasks or sorted(registry.specs, key=lambda task: sizes[registry.specs[task][0]])
    known = {row["task"] for row in rows}
    tasks = [task for task in tasks if task not in known][: options.limit]

    # Imported once: PyTorch's optimizers import its compiler, which takes seconds.
    preloaded = ["sb3_ano", "sb3_ano.envs.envpool_backend", "torch._dynamo", "torch.profiler"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preloaded)
    with options.file.open("a", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS)
        for task in (bar := tqdm(tasks, unit="task")):
            bar.set_postfix_str(task)
            writer.writerow(run_task(task))
            lines.flush()
    print(report(read_rows(options.file)))


if __name__ == "__main__":
    main()
