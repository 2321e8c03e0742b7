"""What the commands share: arguments, how a command ends, and the runs of `dataflow compare PIPELINE.py`."""
