"""The stages of RL post-training, one noun a file. Each is a plain function that a test can call."""
