"""Engines: what samples (hf) and what trains (verl_trainer), behind the Protocols of ``base``."""
