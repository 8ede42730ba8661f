"""The model card of an agent: what a stranger needs to use and judge it."""

import dataclasses
import importlib.metadata
import json
import platform
from typing import Any

import gymnasium as gym

from sb3_ano.algorithms import ANO, ShapedPolicyAlgorithm
from sb3_ano.envs.atari import atari_protocol
from sb3_ano.extras import missing_extra
from sb3_ano.hub.arguments import encode_arguments, encode_policy
from sb3_ano.hub.evaluation import Evaluation, Task
from sb3_ano.hub.hyperparameters import hyperparameters
from sb3_ano.hub.names import CURVE, VIDEO, model_file
from sb3_ano.hub.schedules import SCHEDULES, dotted_name
from sb3_ano.hub.shapes import is_built_in
from sb3_ano.shaping import is_importable

try:
    from huggingface_hub import EvalResult, ModelCard, ModelCardData
except ImportError as error:
    raise missing_extra("hub", error.name or "huggingface-hub") from error

_PACKAGES = ("sb3-ano", "stable-baselines3", "torch", "gymnasium", "numpy")
# The extra and the package that bring environments, by the start of their entry points.
_ENVIRONMENTS = {
    "gymnasium.envs.mujoco": ("mujoco", "mujoco"),
    "gymnasium.envs.box2d": ("zoo", "box2d"),
    "ale_py": ("atari", "ale-py"),
}
# Environments of these are registered without importing anything.
_SHIPPED = ("gymnasium", "ale_py", "shimmy")

_CITATION = """\
@article{zhang2026ano,
  title  = {{ANO}: A Principled Approach to Robust Policy Optimization},
  author = {Zhang, Yiheng and Wang, Yiming and Zhao, Kaiyan and Wan, Zhenglin and Chen, Jiayu and Hou U, Leong},
  year   = {2026}
}
@article{raffin2021stable,
  title   = {Stable-Baselines3: Reliable Reinforcement Learning Implementations},
  author  = {Raffin, Antonin and Hill, Ashley and Gleave, Adam and Kanervisto, Anssi and Ernestus, Maximilian and
             Dormann, Noah},
  journal = {Journal of Machine Learning Research},
  volume  = {22},
  number  = {268},
  year    = {2021}
}"""

_EVALUATE = """\
{imports}from stable_baselines3.common.evaluation import evaluate_policy

from sb3_ano.envs import make_vec_env
from sb3_ano.hub import load_from_hub

env = make_vec_env({env_id!r}, backend={backend!r}, seed={seed!r}{settings})
model = load_from_hub({repo_id!r}, env=env{supplied})
mean, std = evaluate_policy(model, model.get_env(), {n_episodes!r}, deterministic={deterministic!r})
print(f"{{mean:.2f}} +/- {{std:.2f}}")"""

_ACT = """\
from sb3_ano.hub import load_from_hub

model = load_from_hub({repo_id!r}{supplied})
action, _ = model.predict(model.observation_space.sample(), deterministic={deterministic!r})
print(action)"""


@dataclasses.dataclass(frozen=True)
class Agent:
    """The subject of a card.

    :param model: the agent
    :param repo_id: its repository, ``"user/name"``
    :param task: the task that it was trained for
    :param evaluation: its returns
    :param has_video: whether there is a replay video next to the card
    :param has_curve: whether there is a training curve next to the card
    :param license: license of the agent, an SPDX identifier in lower case; None names none
    :param tags: further words to be found by
    """

    model: ShapedPolicyAlgorithm
    repo_id: str
    task: Task
    evaluation: Evaluation
    has_video: bool
    has_curve: bool
    license: str | None = None
    tags: tuple[str, ...] = ()


def versions(task: Task) -> dict[str, str]:
    """Look up the versions of Python and of the installed packages that an agent and its task depend on."""
    installed = {"python": platform.python_version()}
    entry_point = _entry_point(task.env_id)
    environments = [package for start, (_, package) in _ENVIRONMENTS.items() if entry_point.startswith(start)]
    backends = ["envpool"] if task.backend == "envpool" else []
    for package in (*_PACKAGES, *(environments or [_top_package(entry_point)]), *backends):
        try:
            installed[package] = importlib.metadata.version(package)
        except (importlib.metadata.PackageNotFoundError, ValueError):  # ValueError: the empty name
            continue
    return installed


def model_card(agent: Agent) -> ModelCard:
    """Write the metadata by which the Hub finds and shows the agent, and the text of its page."""
    return ModelCard(f"---\n{_metadata(agent).to_yaml()}\n---\n\n{_text(agent)}")


def _metadata(agent: Agent) -> ModelCardData:
    name = agent.model.algorithm
    own = [
        agent.task.env_id,
        "deep-reinforcement-learning",
        "reinforcement-learning",
        "stable-baselines3",
        "sb3-ano",
        name.lower(),
    ]
    arguments = {
        "n_eval_episodes": len(agent.evaluation.returns),
        "deterministic": agent.evaluation.deterministic,
        "seed": agent.evaluation.seed,
    }
    results = [
        EvalResult(
            task_type="reinforcement-learning",
            task_name="reinforcement-learning",
            dataset_type=agent.task.env_id,
            dataset_name=agent.task.env_id,
            metric_type=metric,
            metric_name=metric,
            metric_value=value,
            metric_args=arguments,
        )
        for metric, value in (("mean_reward", agent.evaluation.mean), ("std_reward", agent.evaluation.std))
    ]
    return ModelCardData(
        model_name=f"{name}-{agent.task.env_id}",
        library_name="stable-baselines3",
        pipeline_tag="reinforcement-learning",
        license=agent.license,
        tags=list(dict.fromkeys([*own, *agent.tags])),
        eval_results=results,
    )


def _text(agent: Agent) -> str:
    sections = [
        f"# {agent.model.algorithm} agent for {agent.task.env_id}",
        "Trained with [Stable-Baselines3](https://github.com/DLR-RM/stable-baselines3) and `sb3_ano`, which adds the "
        "policy optimization algorithms ANO, SPO and PAPO to it.",
        f'<video src="https://huggingface.co/{agent.repo_id}/resolve/main/{VIDEO}" controls loop></video>'
        if agent.has_video
        else "",
        _use(agent),
        _evaluation(agent),
        _training(agent),
        f"## Citation\n\n```bibtex\n{_CITATION}\n```",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _code(text: Any) -> str:
    """Show a text as it is, whatever Markdown would make of it."""
    return f"`{' '.join(str(text).replace('`', chr(39)).split())}`"


def _use(agent: Agent) -> str:
    task, evaluation = agent.task, agent.evaluation
    names, remark = _own_parts(agent.model)
    package = _top_package(_entry_point(task.env_id))
    code = (_ACT if task.additions else _EVALUATE).format(
        imports=f"import {package}  # registers the environment\n" if package not in ("", *_SHIPPED) else "",
        env_id=task.env_id,
        settings=f", env_kwargs={task.env_kwargs!r}" if task.env_kwargs else "",
        backend=task.backend,
        repo_id=agent.repo_id,
        supplied="".join(f", {name}=..." for name in names),
        seed=evaluation.seed,
        n_episodes=len(evaluation.returns),
        deterministic=evaluation.deterministic,
    )
    paragraphs = [
        f"## Use\n\n```bash\n{install_line(task)}\n```",
        _environment_remark(task),
        f"```python\n{code}\n```",
        remark,
        "This loads the safe format (`sb3_ano.json` and safetensors), which runs no code of the repository. "
        f"`{model_file(agent.model.algorithm, task.env_id)}` is the same agent as Stable-Baselines3 saves it, for its tools "
        "and for the RL Zoo. It contains pickles: loading it runs whatever code its author put in.",
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _environment_remark(task: Task) -> str:
    if not task.additions:
        return ""
    return (
        f"The agent's environment is {_code(task.env_id)} with {', '.join(map(_code, task.additions))}. Neither "
        f"{_code(task.env_id)} alone nor this package makes it: build it as the author did, and pass it to `load_from_hub` "
        "as `env=`."
    )


def install_line(task: Task) -> str:
    """Write the command that installs what the agent needs."""
    entry_point = _entry_point(task.env_id)
    extras = ["hub", *(extra for start, (extra, _) in _ENVIRONMENTS.items() if entry_point.startswith(start))]
    if task.backend == "envpool":
        extras.append("envpool")
    repository = repository_url()
    return f'pip install "sb3-ano[{",".join(extras)}]{f" @ git+{repository}" if repository else ""}"'


def repository_url() -> str | None:
    """Look up the address of this package's repository, which pyproject.toml sets; None if nothing is installed."""
    try:
        urls = importlib.metadata.metadata("sb3-ano").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return None
    return next((url.partition(", ")[2] for url in urls if url.startswith("Repository, ")), None)


def _entry_point(env_id: str) -> str:
    """Where an environment's class is, ``"module:class"``; empty if it is not known."""
    if atari_protocol(env_id) is not None:
        return "ale_py"
    spec = gym.registry.get(env_id.rpartition(":")[2])
    return spec.entry_point if spec is not None and isinstance(spec.entry_point, str) else ""


def _top_package(entry_point: str) -> str:
    return entry_point.partition(":")[0].partition(".")[0]


def own_objects(model: ShapedPolicyAlgorithm) -> dict[str, Any]:
    """Collect what ``load_safe`` needs as ``custom_objects`` for an agent.

    Schedules are left out: an agent acts without them.
    """
    objects: dict[str, Any] = {}
    encode_policy(model, objects)
    encode_arguments(model, objects)
    return {name: value for name, value in objects.items() if name not in SCHEDULES}


def _own_parts(model: ShapedPolicyAlgorithm) -> tuple[list[str], str]:
    """Arguments of ``load_from_hub`` for what is not built in, and what they are, in words."""
    parts: dict[str, str] = {}
    if isinstance(model, ANO) and not is_built_in(model.shaping_name):
        names = model.shaping_name
        shown = _code(names if isinstance(names, str) else ", ".join(names))
        any_shape = "" if is_importable(model.shaping) else ', or any other, such as `"ano"`: acting does not need it'
        parts["shaping"] = f"{shown}{any_shape}"
    if objects := own_objects(model):
        named = ", ".join(f"{name!r}: {dotted_name(value)}" for name, value in objects.items())
        parts["custom_objects"] = _code(f"{{{named}}}")
    lines = [f"- `{name}=`: {text}" for name, text in parts.items()]
    return list(parts), "\n".join(["It needs what is the author's own, in the place of `...`:", "", *lines]) if lines else ""


def _evaluation(agent: Agent) -> str:
    evaluation = agent.evaluation
    cells = {
        "mean return": f"{evaluation.mean:.2f}",
        "standard deviation": f"{evaluation.std:.2f}",
        "episodes": len(evaluation.returns),
        "mean length": f"{sum(evaluation.lengths) / len(evaluation.lengths):.1f}",
        "actions": "deterministic" if evaluation.deterministic else "sampled",
        "seed": evaluation.seed,
    }
    rows = [cells, ["---"] * len(cells), map(str, cells.values())]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return (
        f"## Evaluation\n\n{table}\n\nReturns are sums of the environment's own rewards, neither normalized nor clipped. "
        "`results.json` has every episode."
    )


def _training(agent: Agent) -> str:
    model, task = agent.model, agent.task
    settings = hyperparameters(model)
    repository = repository_url()
    algorithms = f"[`docs/algorithms.md`]({repository}/blob/HEAD/docs/algorithms.md)" if repository else "`docs/algorithms.md`"
    additions = [*([json.dumps(task.env_kwargs)] if task.env_kwargs else []), *task.additions]
    environment = _code(task.env_id) + (f" with {', '.join(map(_code, additions))}" if additions else "")
    lines = [
        f"- environment: {environment}",
        f"- algorithm: {model.algorithm}, {model.num_timesteps:,} steps, {settings['n_envs']} environment(s); {algorithms} of "
        "sb3_ano defines the algorithms and shapes",
        f"- seed: {model.seed if model.seed is not None else 'none was set'}",
        "- versions: " + ", ".join(f"{package} {version}" for package, version in versions(task).items()),
    ]
    parts = [
        "## Training",
        "\n".join(lines),
        f"![Returns of the training episodes](./{CURVE})" if agent.has_curve else "",
        f"### Hyperparameters\n\n```json\n{json.dumps(settings, indent=2)}\n```",
    ]
    return "\n\n".join(part for part in parts if part)
