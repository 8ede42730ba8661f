"""Environments by id."""

from sb3_ano.envs.make import explained_missing_packages, make_env, register_atari

__all__ = ["explained_missing_packages", "make_env", "register_atari"]
