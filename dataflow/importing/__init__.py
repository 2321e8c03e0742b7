"""`dataflow import-verl`: a launch of verl as this project's overrides."""
