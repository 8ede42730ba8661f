"""Prepare an agent for the Hugging Face Hub, and load it without pickles: ``python examples/share.py OUT.png``."""

import tempfile
from pathlib import Path
from typing import Any

from common import save
from matplotlib.figure import Figure

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import load_safe, package

if __name__ == "__main__":
    env = make_vec_env("CartPole-v1", n_envs=8, seed=0)
    model = ANO(
        "MlpPolicy",
        env,
        learning_rate=2e-3,
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        seed=0,
    ).learn(40_000)
    with tempfile.TemporaryDirectory() as directory:
        agent = package(model, Path(directory) / "agent", "me/ano-CartPole-v1", n_eval_episodes=10, video=False)
        print(sorted(path.name for path in agent.iterdir()))  # push_to_hub(model, "me/ano-CartPole-v1") pushes these
        loaded = load_safe(agent)  # runs no code of the directory; load_from_hub("me/ano-CartPole-v1") does the same

    render = make_vec_env("CartPole-v1", n_envs=1, seed=1, env_kwargs={"render_mode": "rgb_array"})
    observations: Any = render.reset()
    figure = Figure(figsize=(8, 1.6), layout="constrained")
    for number, axes in enumerate(figure.subplots(1, 4)):
        axes.imshow(render.render())
        axes.set_axis_off()
        axes.set_title(f"step {100 * number}", fontsize=10)
        for _step in range(100):
            actions, _ = loaded.predict(observations, deterministic=True)
            observations, _rewards, _dones, _infos = render.step(actions)
    save(figure)
