"""What an algorithm can be named: tables of verl's estimators, losses and corrections, and presets. Pure."""
