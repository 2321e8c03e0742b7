"""What a run did, when, and what its GPUs waited for: spans, their attribution, ways to look at them."""
