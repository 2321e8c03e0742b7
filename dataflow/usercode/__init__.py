"""Code that users write: loaded, called, copied for, and named when it fails."""
