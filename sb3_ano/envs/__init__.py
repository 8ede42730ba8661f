"""Environments by id."""

from sb3_ano.envs.make import explained_env_errors, make_env

__all__ = ["explained_env_errors", "make_env"]
