"""Registers the envs of ``odd_envs`` that are stepped in processes of their own, which have no fixtures."""

import gymnasium

for kind in ("Dies", "NoReward"):
    gymnasium.register(f"{kind}-v0", entry_point=f"tests.unit.odd_envs:{kind}", max_episode_steps=50)
