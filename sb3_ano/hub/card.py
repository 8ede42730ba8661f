"""The model card of an agent: what a stranger needs to use and judge it."""

import dataclasses
import importlib.metadata
import json
import platform
from typing import Any

from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.extras import missing_extra
from sb3_ano.hub.evaluation import Evaluation, Task
from sb3_ano.hub.formulas import surrogate_text
from sb3_ano.hub.hyperparameters import hyperparameters
from sb3_ano.hub.names import CURVE, VIDEO, model_file
from sb3_ano.hub.snippet import install_line, usage_lines

try:
    from huggingface_hub import EvalResult, ModelCard, ModelCardData
except ImportError as error:
    raise missing_extra("hub", error.name or "huggingface-hub") from error

_PACKAGES = ("sb3-ano", "stable-baselines3", "torch", "gymnasium", "numpy", "mujoco", "ale-py", "envpool")

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


@dataclasses.dataclass(frozen=True)
class Agent:
    """What a card is about.

    :param model: the agent
    :param repo_id: where it goes, ``"user/name"``
    :param task: what it was trained for
    :param evaluation: its returns
    :param has_video: whether a replay video is beside the card
    :param has_curve: whether a training curve is beside the card
    :param license: of the agent, an SPDX identifier in lower case
    :param tags: more words to be found by
    """

    model: ShapedPolicyAlgorithm
    repo_id: str
    task: Task
    evaluation: Evaluation
    has_video: bool
    has_curve: bool
    license: str = "mit"
    tags: tuple[str, ...] = ()


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that an agent depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def model_card(agent: Agent) -> ModelCard:
    """Metadata by which the Hub finds and shows the agent, and the text of its page."""
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
        "policy optimisation algorithms ANO, SPO and PAPO to it.",
        f'<video src="https://huggingface.co/{agent.repo_id}/resolve/main/{VIDEO}" controls loop></video>'
        if agent.has_video
        else "",
        _use(agent),
        _evaluation(agent),
        _training(agent),
        f"## Citation\n\n```bibtex\n{_CITATION}\n```",
        f"## Licence\n\n`{agent.license}`",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _use(agent: Agent) -> str:
    zip_name = model_file(agent.model.algorithm, agent.task.env_id)
    return f"""## Use

```bash
{install_line(agent.task)}
```

```python
{usage_lines(agent.model, agent.repo_id, agent.task, agent.evaluation)}
```

This loads the safe format (`sb3_ano.json` and safetensors), which runs no code of the repository. `{zip_name}` is the same
agent as Stable-Baselines3 saves it, for its tools and for the RL Zoo. It contains pickles: loading it runs whatever code its
author put in."""


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
        f"## Evaluation\n\n{table}\n\nReturns are sums of the environment's own rewards, neither normalised nor clipped. "
        "`results.json` has every episode."
    )


def _training(agent: Agent) -> str:
    model = agent.model
    settings = f" with `{json.dumps(agent.task.env_kwargs)}`" if agent.task.env_kwargs else ""
    found = hyperparameters(model)
    lines = [
        "## Training",
        f"- environment: `{agent.task.env_id}`{settings}",
        f"- algorithm: {model.algorithm}, {model.num_timesteps:,} steps, {found['n_envs']} environment(s)",
        f"- seed: {model.seed if model.seed is not None else 'none was set'}",
        "- versions: " + ", ".join(f"{package} {version}" for package, version in versions().items()),
    ]
    parts = [
        "\n".join([lines[0], "", *lines[1:]]),
        f"![Returns of the training episodes](./{CURVE})" if agent.has_curve else "",
        f"### Surrogate\n\n{surrogate_text(model)}",
        f"### Hyperparameters\n\n```json\n{_as_json(found)}\n```",
    ]
    return "\n\n".join(part for part in parts if part)


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=2)
