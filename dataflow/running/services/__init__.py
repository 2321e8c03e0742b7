"""The services of a run, from its configuration: trainer, engine, reward agents and reward models."""
