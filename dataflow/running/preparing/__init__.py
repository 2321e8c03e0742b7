"""What a run needs before it starts, each part with its check; `dataflow run ... dry=true` shows them all."""
