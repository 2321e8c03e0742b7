"""Stages that change scores between the reward and the advantage: combine, normalize, KL penalty."""
