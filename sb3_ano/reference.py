"""ANO on one page: SB3's PPO with another surrogate. It has no speed and no checks; use :class:`sb3_ano.ANO` to train.

Paper: "ANO: A Principled Approach to Robust Policy Optimization", Section 4 and Algorithm 1.
"""

import math
from collections.abc import Callable

import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from torch.nn import functional as F


def shape(x: torch.Tensor) -> torch.Tensor:
    """Compute ANO's shape h(x) (Eq. f_ANO), where x is the distance of the ratio from 1 in radii.

    :param x: deviations, any shape
    :return: values of the same shape, with ``h(0) = 0`` and the peak at ``x = 1``
    """
    # 4 - 4 sigmoid(v) is 4 sigmoid(-v), whose gradient would lose all digits on the right tail.
    v = (1.0 - x) * math.log(2.0)
    phi = F.softplus(2.0 * v, threshold=40.0) + 4.0 - 4.0 * torch.sigmoid(v)
    phi_at_anchor = math.log(5.0) + 4.0 / 3.0

    return 45.0 / (32.0 * math.log(2.0)) * (phi_at_anchor - phi)


def surrogate(
    log_ratio: torch.Tensor, advantages: torch.Tensor, h: Callable[[torch.Tensor], torch.Tensor], clip_range: float
) -> torch.Tensor:
    """Compute the objective of Definition 3.2, ``A + |A| eps h(x)``, to be maximized.

    :param log_ratio: log-probability of the actions minus that in the rollout, ``(batch,)``
    :param advantages: advantages, ``(batch,)``
    :param h: shape
    :param clip_range: radius, eps in the paper
    :return: objective of each sample, ``(batch,)``
    """
    # expm1 is the ratio less 1, with full precision near a ratio of 1.
    signed_radius = clip_range * torch.where(advantages >= 0, 1.0, -1.0)
    x = torch.expm1(log_ratio) / signed_radius

    return advantages + advantages * signed_radius * h(x)


class ReferenceANO(PPO):
    """Train as in Algorithm 1 of the paper, with the arguments of SB3's PPO.

    ``clip_range_vf`` and ``target_kl`` have no effect. Another shape is an attribute of a subclass.
    """

    shape = staticmethod(shape)

    def train(self) -> None:
        """Update the policy on the current rollout."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        clip_range = self.clip_range(self._current_progress_remaining)  # type: ignore[operator]

        for _ in range(self.n_epochs):
            for samples in self.rollout_buffer.get(self.batch_size):
                actions = samples.actions
                # The buffer stores them as float columns.
                if isinstance(self.action_space, spaces.Discrete):
                    actions = actions.long().flatten()
                values, log_prob, entropy = self.policy.evaluate_actions(samples.observations, actions)

                # Per minibatch, as in SB3. The deviation of a single advantage is NaN.
                advantages = samples.advantages
                if self.normalize_advantage and len(advantages) > 1:
                    centered = advantages - advantages.mean()
                    advantages = centered / (advantages.std() + 1e-8)

                log_ratio = log_prob - samples.old_log_prob
                objective = surrogate(log_ratio, advantages, self.shape, clip_range)
                policy_loss = -objective.mean()
                value_loss = F.mse_loss(samples.returns, values.flatten())

                # Without a closed form, the log-probabilities of the actions estimate the entropy.
                if entropy is None:
                    entropy = -log_prob
                entropy_loss = -entropy.mean()
                loss = policy_loss + self.ent_coef * entropy_loss + self.vf_coef * value_loss

                self.policy.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
                self.policy.optimizer.step()

            self._n_updates += 1
