"""Train on Atari, and show what the policy sees: ``python examples/atari.py OUT.png``."""

from typing import Any

from common import save
from matplotlib.figure import Figure

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env

if __name__ == "__main__":
    env = make_vec_env("Breakout-v5", n_envs=8, seed=0)  # EnvPool or ale-py; frames are stacked already
    print(f"{env.num_envs} games by {env.backend}, observations {env.observation_space.shape}")  # type: ignore[attr-defined]
    model = ANO("CnnPolicy", env, n_steps=128, batch_size=256, n_epochs=4, learning_rate=2.5e-4, ent_coef=0.01, seed=0)
    model.learn(8_192)  # a minute; the zoo trains for six million steps

    observations: Any = env.reset()
    for _step in range(40):
        actions, _ = model.predict(observations)
        observations, rewards, dones, infos = env.step(actions)
    figure = Figure(figsize=(7, 2.2), layout="constrained")
    for age, (axes, image) in enumerate(zip(figure.subplots(1, 4), observations[0], strict=True)):
        axes.imshow(image, cmap="gray")
        axes.set_axis_off()
        axes.set_title("newest" if age == 3 else f"{4 * (3 - age)} frames ago", fontsize=10)
    save(figure)
