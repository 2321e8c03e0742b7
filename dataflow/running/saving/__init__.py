"""Saves what a run is to go on from, and the model that it leaves: checkpoints, their manifests, exports."""
