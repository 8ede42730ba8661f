"""The zoo's commands: what is set up before each of them, and which code it runs."""

import functools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path

import gymnasium as gym
import rl_zoo3.train
from huggingface_sb3 import EnvironmentName  # type: ignore[import-untyped]
from optuna.exceptions import ExperimentalWarning
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO

from sb3_ano._io import remove_leftovers
from sb3_ano._registry import ALGORITHMS
from sb3_ano.envs import explained_missing_packages, register_atari
from sb3_ano.envs.vec_env import register_envpool
from sb3_ano.zoo import agents, fixes, settings
from sb3_ano.zoo.manager import Manager, make_manager, plan_training
from sb3_ano.zoo.packages import directory_name, import_packages, read_packages, require_registered, split_module
from sb3_ano.zoo.parsing import PLOTS, Options, run_zoo
from sb3_ano.zoo.settings import is_trusted

# Names of the videos of record_training and record_video.
_RECORDINGS = ("*-step-*-to-step-*.mp4", "training.mp4", "training.gif")
# These show an agent of a run, whose training has named the packages of its environment.
_VIDEOS = ("record_video", "record_training", "push_to_hub")
_SHOW_RUN = ("enjoy", *_VIDEOS)


def run_command(name: str, arguments: Sequence[str], program: str) -> None:
    """Run a command of the zoo.

    :param name: name of the command
    :param arguments: command line without the command
    :param program: program and command as the user typed them
    :raises ValueError: if an option is invalid
    :raises SystemExit: after help, or if nothing remains to be done
    """
    with ExitStack() as stack:
        stack.enter_context(explained_missing_packages())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", ExperimentalWarning)  # of Optuna
        # As a script, a module that has been imported runs a second time, as with "python -m".
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        options = Options(name, program, arguments)
        values = options.values
        if options.take("trust_remote_code"):
            stack.enter_context(fixes.variable("TRUST_REMOTE_CODE", "1"))  # which children inherit

        if getattr(values, "folder", None) and hasattr(values, "algo"):
            _choose_folder(options)
            remove_leftovers(Path(values.folder) / values.algo)  # of a load_from_hub that was killed
        if name == "train":
            _train(stack, options)
            return

        values.gym_packages = _prepare_environment(stack, options, None)
        # With fewer environments than in training, minibatches can have odd sizes, which does not matter for acting.
        warnings.filterwarnings("ignore", "batch_size=.* does not divide the rollout", UserWarning)
        if name in _VIDEOS:
            from sb3_ano.hub.video import software_rendering  # only videos need it

            stack.enter_context(software_rendering())
            stack.enter_context(fixes.ffmpeg_on_path())
        _COMMANDS[name](options)


def _choose_folder(options: Options) -> None:
    """Take agents from where ``train`` writes them, if there are any; the zoo downloads others to another directory."""
    values = options.values
    if options.command not in ("enjoy", "record_video", "record_training") or "folder" in options.given():
        return
    if values.algo in ALGORITHMS or any(Path("logs", values.algo).glob(f"{values.env}_*")):
        values.folder = "logs"


def _train(stack: ExitStack, options: Options) -> None:
    """Train with our manager of experiments."""
    values = options.values
    # The engine computes their losses and rollouts.
    is_known = values.algo in ALGORITHMS or issubclass(rl_zoo3.ALGOS[values.algo], PPO | RecurrentPPO)
    if values.accelerate and not is_known:
        allowed = f"ppo and ppo_lstm; {', '.join(ALGORITHMS)} are always accelerated"
        raise ValueError(f"--accelerate cannot accelerate {values.algo}; allowed are {allowed}")

    plan = plan_training(options)
    # Runs that are continued name the packages of their environments.
    continued = plan.get("resumed")
    if continued is None and values.trained_agent:
        continued = Path(values.trained_agent).parent
    values.gym_packages = _prepare_environment(stack, options, continued)

    # These end with the command, and not with this function.
    if values.track:
        stack.enter_context(fixes.secrets_in_wandb())
    stack.enter_context(fixes.evaluations())
    # The zoo's code makes its manager in one place, by this name.
    manager = functools.partial(make_manager, others=Manager, **plan)
    stack.enter_context(fixes.replaced(rl_zoo3.train, "ExperimentManager", manager))
    run_zoo("train", values)


def _prepare_environment(stack: ExitStack, options: Options, run: Path | None) -> list[str]:
    """Import what registers the environment, and check that it is registered.

    :param stack: stack of the command
    :param options: options of the command
    :param run: directory of the run that a training continues, or None
    :return: modules that the user has named; in a training, also those of the run
    :raises ValueError: if a module cannot be imported, or nothing registers the environment
    """
    command = options.command
    values = options.values
    packages = list(values.gym_packages)
    env = getattr(values, "env", None)

    if command in PLOTS:
        # Directories have names without a slash.
        if env is not None:
            values.env = [directory_name(name) for name in env]
        import_packages(packages)
        return packages

    if env is not None:
        gym_id = env.gym_id if isinstance(env, EnvironmentName) else env
        modules, gym_id = split_module(gym_id)
        packages += modules
        values.env = type(env)(gym_id)
        register_atari(gym_id)
    import_packages(packages)

    # What the user names may also have the wrappers and networks of a run.
    user_modules = {package.partition(".")[0] for package in packages}
    stack.enter_context(fixes.replaced(settings, "user_modules", settings.user_modules | user_modules))
    # A trusted author's agent need not run here.
    if env is None or (command == "load_from_hub" and is_trusted()):
        return packages

    if command in _SHOW_RUN:
        run = agents.run_of(values)
    if run is not None and gym_id not in gym.registry:
        found = read_packages(run, EnvironmentName(gym_id))
        import_packages(found, source=f"{run} was trained with --gym-packages")
        if command == "train":
            packages += found
    register_envpool(gym_id)
    require_registered(gym_id, packages)
    return packages


def _enjoy(options: Options) -> None:
    values = options.values
    if not (_has_display() or values.no_render):
        print("There is no display to show the agent on, so only its returns are printed; record_video makes a video")
        values.no_render = True

    # As in the zoo, only to the directory of its own agents.
    if "rl-trained-agents" in values.folder and not any(agents.run_of(values).glob("*.zip")):
        from sb3_ano.zoo.hub_commands import load_from_sb3  # imports what only the Hub needs

        load_from_sb3(values.algo, values.env, values.folder, values.exp_id, values.gym_packages)
    agents.enjoy(values)


def _has_display() -> bool:
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _record_video(options: Options) -> None:
    agents.record_video(options.values)


def _record_training(options: Options) -> None:
    """Run the zoo's command, which removes the directory of its videos before it writes to it.

    :raises ValueError: if the directory holds other files than recordings
    """
    values = options.values
    run = agents.run_of(values)
    directory = Path(values.output_folder or run / "videos")
    files = directory.iterdir() if directory.is_dir() else ()
    for path in files:
        is_recording = any(fnmatch(path.name, name) for name in _RECORDINGS)
        if not path.is_file() or not is_recording:
            raise ValueError(f"{directory} holds {path.name!r}, which would be lost; -o names another directory")

    if values.exp_id == 0:  # the zoo would take the newest run, also without an agent
        values.exp_id = agents.newest_run(Path(values.folder, values.algo), values.env)
    with fixes.child_processes(values.gym_packages):
        run_zoo("record_training", values)


def _benchmark(options: Options) -> None:
    from sb3_ano.zoo.benchmark import benchmark  # imports what only this command needs

    benchmark(options.values, options.program)


def _push_to_hub(options: Options) -> None:
    from sb3_ano.zoo.hub_commands import push  # imports the safe format

    push(options.values)


def _load_from_hub(options: Options) -> None:
    from sb3_ano.zoo.hub_commands import load  # imports the safe format

    load(options.values, is_safe=options.values.algo in ALGORITHMS and not is_trusted())


def _plot(options: Options) -> None:
    from sb3_ano.zoo.figures import checked_results, figures  # imports pyplot, which only plots need

    # Without a legend there are no curves, which is an error with its reason.
    warnings.filterwarnings("ignore", "No artists with labels found", UserWarning)
    values = options.values
    file = options.take("figure")
    with ExitStack() as stack:
        stack.enter_context(figures(options.command, values, file, has_display=_has_display()))
        if options.command == "plot_from_file":
            values = stack.enter_context(checked_results(values))
        run_zoo(options.command, values)


_COMMANDS: dict[str, Callable[[Options], None]] = {
    "enjoy": _enjoy,
    "record_video": _record_video,
    "record_training": _record_training,
    "benchmark": _benchmark,
    "push_to_hub": _push_to_hub,
    "load_from_hub": _load_from_hub,
    **dict.fromkeys(PLOTS, _plot),
}
