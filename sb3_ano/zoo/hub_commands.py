"""``push_to_hub`` and ``load_from_hub`` of ano, spo and papo, with the zoo's options and without its pickles."""

import argparse
import functools
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from stable_baselines3.common.utils import set_random_seed

from sb3_ano.algorithms.saving import read_saved_model
from sb3_ano.extras import missing_extra
from sb3_ano.hub import download_run, push_to_hub
from sb3_ano.hub.repository import explained
from sb3_ano.zoo.folders import no_empty_folders

try:
    import rl_zoo3
    import rl_zoo3.utils
    import yaml
    from huggingface_sb3 import EnvironmentName, ModelName, ModelRepoId  # type: ignore[import-untyped]
    from rl_zoo3.exp_manager import ExperimentManager
except ImportError as error:
    raise missing_extra("zoo", error.name or "rl-zoo3") from error

__all__ = ["explained", "load", "push"]


def push(arguments: Sequence[str]) -> None:
    """Push the agent of a run, in both formats, with a card that says how to install this package.

    :param arguments: the zoo's
    :raises ValueError: if there is no such agent
    :raises HubError: if the Hub, the connection or the disk refuses
    """
    args = _push_parser().parse_args(arguments)
    _, model_path, log_path = rl_zoo3.utils.get_model_path(
        args.exp_id, args.folder, args.algo, args.env, args.load_best, args.load_checkpoint, args.load_last_checkpoint
    )
    print(f"Loading {model_path}")
    if args.num_threads > 0:
        torch.set_num_threads(args.num_threads)
    settings = Path(log_path) / args.env
    hyperparams, stats_path = rl_zoo3.utils.get_saved_hyperparams(str(settings), test_mode=True)
    env_kwargs = _env_kwargs(settings, hyperparams) | (args.env_kwargs or {})
    shown = {} if args.no_render else {"render_mode": "rgb_array"}
    env = rl_zoo3.utils.create_test_env(
        args.env.gym_id,
        n_envs=args.n_envs,
        stats_path=stats_path,
        seed=args.seed,
        should_render=not args.no_render,
        hyperparams=hyperparams,
        env_kwargs=shown | env_kwargs,
    )
    try:
        with warnings.catch_warnings():
            # Minibatches of odd sizes, because there are fewer environments than in training, do not matter for acting.
            warnings.filterwarnings("ignore", "batch_size=.* does not divide the rollout", UserWarning)
            model = rl_zoo3.ALGOS[args.algo].load(model_path, env=env, device=args.device)
        # The number of environments is published as it was in the training, not as it is here.
        model.n_envs = read_saved_model(model_path).attributes["n_envs"]
        set_random_seed(args.seed)  # loading has set the seed of the training
        url = push_to_hub(
            model, _repo_id(args), env, env_id=args.env.gym_id, env_kwargs=env_kwargs, seed=args.seed, run=log_path,
            deterministic=not _is_stochastic(args), video=False if args.no_render else "auto",
            video_length=args.n_timesteps, commit_message=args.commit_message, verbose=args.verbose,
        )  # fmt: skip
    finally:
        env.close()
    print(f"The agent is at {url}")


def load(arguments: Sequence[str]) -> None:
    """Download an agent from its safe format, in which no code can be, as a run for ``enjoy`` and the other commands.

    :param arguments: the zoo's
    :raises HubError: if the Hub, the connection or the disk refuses
    :raises ValueError: if the repository holds no safe format, or the folder is there and --force was not given
    """
    args = _load_parser().parse_args(arguments)
    folder = Path(args.folder) / args.algo
    number = args.exp_id or rl_zoo3.get_latest_run_id(str(folder), args.env) + 1
    run = folder / f"{args.env}_{number}" if number > 0 else folder
    if run.exists() and not args.force:
        raise ValueError(f"the folder {run} is there; --force replaces it, --exp-id 0 makes a new one")
    try:
        _replace(run, functools.partial(download_run, _repo_id(args), env_id=args.env.gym_id))
    except ValueError as error:
        if "trust_remote_code=True" not in str(error):
            raise
        raise ValueError(str(error).replace("pass trust_remote_code=True", "use --trust-remote-code")) from error
    print(f"Saved to {run}")


def _replace(run: Path, download: Any) -> None:
    """Put a new run in the place of one that may be there, once it is whole."""
    with no_empty_folders(run.parent, run.parent.parent):
        run.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=run.parent, prefix=".download-") as temporary:
            downloaded, old = download(Path(temporary) / "run"), Path(temporary) / "old"
            if run.exists():
                run.rename(old)
            try:
                downloaded.rename(run)
            except OSError:
                old.rename(run)
                raise


def _repo_id(args: argparse.Namespace) -> str:
    return str(ModelRepoId(args.organization, args.repo_name or ModelName(args.algo, args.env)))


def _env_kwargs(settings: Path, hyperparams: dict[str, Any]) -> dict[str, Any]:
    """The environment's settings in the training: of the hyperparameters, and of the command line, which count more."""
    found = dict(hyperparams.pop("env_kwargs", None) or {})
    file = settings / "args.yml"
    if file.is_file():
        # Reading the hyperparameters has checked the file.
        found |= yaml.unsafe_load(file.read_text()).get("env_kwargs") or {}
    return found


def _is_stochastic(args: argparse.Namespace) -> bool:
    """As in the zoo, Atari's agents sample."""
    return args.stochastic or (ExperimentManager.is_atari(args.env.gym_id) and not args.deterministic)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--env", type=EnvironmentName, required=True)
    parser.add_argument("-f", "--folder", required=True)
    parser.add_argument("--algo", required=True)
    parser.add_argument("-name", "--repo-name")
    parser.add_argument("--exp-id", type=int, default=0)
    parser.add_argument("--verbose", type=int, default=1)
    return parser


def _push_parser() -> argparse.ArgumentParser:
    """The zoo's options, which it parses where it cannot be called; its help is shown for them."""
    parser = _parser()
    parser.add_argument("-orga", "--organization", required=True)
    parser.add_argument("-m", "--commit-message", default="Initial commit")
    parser.add_argument("-n", "--n-timesteps", type=int, default=1000)
    parser.add_argument("--num-threads", type=int, default=-1)
    parser.add_argument("--n-envs", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-checkpoint", type=int)
    for flag in ("--no-render", "--deterministic", "--stochastic", "--load-best", "--load-last-checkpoint"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--env-kwargs", nargs="+", action=rl_zoo3.utils.StoreDict)
    return parser


def _load_parser() -> argparse.ArgumentParser:
    parser = _parser()
    parser.add_argument("-orga", "--organization", default="sb3")
    parser.add_argument("--force", action="store_true")
    return parser
