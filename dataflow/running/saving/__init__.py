"""Saves what a run resumes from, and its trained model: checkpoints, their manifests, exports."""
