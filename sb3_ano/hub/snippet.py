"""The lines of a model card that load and run the agent; they run as they stand."""

from typing import Any

import gymnasium as gym
from gymnasium.error import Error as GymnasiumError

from sb3_ano.algorithms import ANO, ShapedPolicyAlgorithm
from sb3_ano.hub.arguments import encode_arguments, encode_policy
from sb3_ano.hub.evaluation import Evaluation, Task
from sb3_ano.hub.schedules import SCHEDULES, dotted_name
from sb3_ano.hub.shapes import is_built_in
from sb3_ano.shaping import SHAPINGS, is_importable

# Which extra brings the environments of a package, by the start of their entry points.
_EXTRAS = {"gymnasium.envs.mujoco": "mujoco", "ale_py": "atari", "gymnasium.envs.box2d": "zoo"}
_SHIPPED = ("gymnasium", "ale_py", "shimmy")


def install_line(task: Task) -> str:
    """The command that installs what the agent needs."""
    entry = _entry_point(task.env_id)
    extras = ["hub", *(extra for start, extra in _EXTRAS.items() if entry.startswith(start))]
    return f"pip install 'sb3-ano[{','.join(extras)}]'"


def usage_lines(model: ShapedPolicyAlgorithm, repo_id: str, task: Task, evaluation: Evaluation) -> str:
    """The Python that loads the agent, and evaluates it as the card reports, or, if its environment needs more than an id,
    lets it act once.

    :param model: the agent
    :param repo_id: where it is
    :param task: what it was trained for
    :param evaluation: the evaluation that the card reports
    """
    own_imports, own_arguments = _own_parts(model)
    load = f'load_from_hub("{repo_id}"'
    if not task.from_id:
        imports = [*own_imports, "from sb3_ano.hub import load_from_hub"]
        body = [
            f"model = {load}{own_arguments})",
            f"action, _ = model.predict(model.observation_space.sample(), deterministic={evaluation.deterministic})",
            "print(action)",
        ]
        return "\n".join([*imports, "", *body])
    imports = [
        *_environment_imports(task.env_id),
        "from stable_baselines3.common.evaluation import evaluate_policy",
        "",
        *own_imports,
        "from sb3_ano.envs import make_vec_env",
        "from sb3_ano.hub import load_from_hub",
    ]
    settings = f", env_kwargs={task.env_kwargs!r}" if task.env_kwargs else ""
    backend = ', backend="gymnasium"' if task.in_gymnasium() else ""
    body = [
        f'env = make_vec_env("{task.env_id}"{backend}, seed={evaluation.seed}{settings})',
        f"model = {load}, env=env{own_arguments})",
        f"mean, std = evaluate_policy(model, model.get_env(), {len(evaluation.returns)}, "
        f"deterministic={evaluation.deterministic})",
        'print(f"{mean:.2f} +/- {std:.2f}")',
    ]
    return "\n".join([*imports, "", *body])


def _entry_point(env_id: str) -> str:
    if env_id.startswith("ALE/") or "NoFrameskip" in env_id:
        return "ale_py"
    try:
        return str(gym.spec(env_id).entry_point)
    except (GymnasiumError, ModuleNotFoundError):
        return ""


def _environment_imports(env_id: str) -> list[str]:
    """The package that registers the environment, unless gymnasium does, or the id names it."""
    package = _entry_point(env_id).partition(":")[0].partition(".")[0]
    foreign = package and package.isidentifier() and package not in _SHIPPED and ":" not in env_id
    return [f"import {package}  # registers the environment", ""] if foreign else []


def objects_of_ones_own(model: ShapedPolicyAlgorithm) -> dict[str, Any]:
    """What ``load_safe`` needs to be given for an agent, as its ``custom_objects``.

    Schedules are left out: an agent acts without them.
    """
    objects: dict[str, Any] = {}
    encode_policy(model, objects)
    encode_arguments(model, objects)
    return {name: value for name, value in objects.items() if name not in SCHEDULES}


def _own_parts(model: ShapedPolicyAlgorithm) -> tuple[list[str], str]:
    """Import lines and arguments for what is not built in: the shape, and classes of the author's."""
    imports, arguments = _shaping(model)
    objects = objects_of_ones_own(model)
    if objects:
        named = {name: dotted_name(value).partition(":") for name, value in objects.items()}
        imports += [f"from {module} import {top.partition('.')[0]}" for module, _, top in named.values()]
        arguments += f", custom_objects={{{', '.join(f'{name!r}: {path}' for name, (_, _, path) in named.items())}}}"
    return sorted(set(imports)), arguments


def _shaping(model: ShapedPolicyAlgorithm) -> tuple[list[str], str]:
    if not isinstance(model, ANO) or is_built_in(model.shaping_name):
        return [], ""
    names = [model.shaping_name] if isinstance(model.shaping_name, str) else list(model.shaping_name)
    if not is_importable(model.shaping) or any(name not in SHAPINGS and name.startswith("from_ratio(") for name in names):
        return [], ', shaping="ano"'  # the shape of the training has no name to import, and does not matter for acting
    parts = [name.partition(":") for name in names]
    imports = [f"from {module} import {function}" for module, _, function in parts if function]
    values = [function or repr(module) for module, _, function in parts]
    return imports, f", shaping={values[0]}" if len(values) == 1 else f", shaping=({', '.join(values)})"
