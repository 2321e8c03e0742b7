"""The forms in which verl's scalars come: each file reads one of them."""
