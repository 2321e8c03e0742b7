"""What a stage's function says about itself, and what it is given."""
